"""Triton kernels for causal attention of few tokens, in one quadratic tile, and device functions of a tile.

With L the lower triangle of ones, a = scale gain (Eq. 4: 1 and 1), o elementwise and w_i the inverse
denominator (Eq. 7: 1), within a tile

    A = scale L + a L o (Q^ K^^T),    out_i = w_i (A V)_i
    dcos = L o (G V^T + delta),    dQ^ = a dcos K^,    dK^ = a dcos^T Q^,    dV = A^T G

where G_i = w_i dout_i and delta_i is the gradient of Eq. 4's denominator. A^T and dcos^T are products of
their own: transposed accumulators in products have been miscompiled for Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from clip_la.attention.triton_parts import (
    dot,
    high,
    load_number,
    load_quotient_gradients,
    load_rows,
    nothing,
    of_head,
    product,
    row_norms,
    slope_of,
    store_number,
    store_rows,
    this_head,
    through_norm,
    tile,
    unit_factor,
    write_attention,
)


@triton.jit
def not_later(BLOCK: tl.constexpr):
    """L: whether the key of a column comes no later than the query of a row."""
    return tl.arange(0, BLOCK)[:, None] >= tl.arange(0, BLOCK)[None, :]


@triton.jit
def cosines(x, y, x_factor, y_factor):
    """x^_i.y^_j."""
    return product(x, tl.trans(y)) * x_factor[:, None] * y_factor[None, :]


@triton.jit
def rounded_for(rows, weights):
    """The weights of a tile, to multiply rows by: bfloat16 where these are, as FlashAttention's are."""
    return high(weights) if rows.dtype == tl.bfloat16 else weights


@triton.jit
def tile_attention(numerator, q, k, v, q_factor, k_factor, scale, slope, CONFIG: tl.constexpr):
    """numerator + A V, and the sums over the tile's visible keys of q^_i.k^_n."""
    visible = not_later(CONFIG.BLOCK)
    cos = tl.where(visible, cosines(q, k, q_factor, k_factor), 0.0)
    A = tl.where(visible, scale, 0.0) + slope * cos
    return dot(rounded_for(v, A), v, numerator), tl.sum(cos, 1)


@triton.jit
def tile_query_gradients(dq_unit, dout, k, v, k_factor, weight, delta, CONFIG: tl.constexpr):
    """dq_unit + dcos K^."""
    dcos = product(dout, tl.trans(v)) * weight[:, None] + delta[:, None]
    dcos = tl.where(not_later(CONFIG.BLOCK), dcos, 0.0) * k_factor[None, :]
    return dot(rounded_for(k, dcos), k, dq_unit)


@triton.jit
def tile_key_gradients(dk_unit, dout, q, v, q_factor, weight, delta, CONFIG: tl.constexpr):
    """dk_unit + dcos^T Q^."""
    seeing = tl.trans(not_later(CONFIG.BLOCK))
    dcos = product(v, tl.trans(dout)) * weight[None, :] + delta[None, :]
    dcos = tl.where(seeing, dcos, 0.0) * q_factor[None, :]
    return dot(rounded_for(q, dcos), q, dk_unit)


@triton.jit
def tile_value_gradients(dv, dout, q, k, q_factor, k_factor, weight, scale, slope, CONFIG: tl.constexpr):
    """dv + A^T G."""
    seeing = tl.trans(not_later(CONFIG.BLOCK))
    A = tl.where(seeing, scale + slope * cosines(k, q, k_factor, q_factor), 0.0)
    return dot(rounded_for(dout, A * weight[None, :]), dout, dv)


@triton.jit
def visible_keys(num_keys, tokens, rows, inside):
    """How many keys each query sees: all up to itself, unless padded."""
    return load_number(num_keys, tokens, inside) if num_keys is not None else (rows + 1).to(tl.float32)


@triton.jit(do_not_specialize=["H", "N"])
def tile_forward_kernel(
    q, k, v, gain, num_keys, out, exact_out, q_norms, k_norms, denominators, scale, H, N, CONFIG: tl.constexpr
):
    """One program a head, all of its tokens at once."""
    head = this_head()
    rows, inside = tile(0, N, CONFIG.BLOCK)
    tokens = head * N + rows
    q_rows = load_rows(of_head(q, head, H), rows, inside, CONFIG.D, CONFIG.BLOCK_D)
    k_rows = load_rows(of_head(k, head, H), rows, inside, CONFIG.D, CONFIG.BLOCK_D)
    v_rows = load_rows(of_head(v, head, H), rows, inside, CONFIG.E, CONFIG.BLOCK_E)
    q_norm, k_norm = row_norms(q_rows, CONFIG.NORMALISE), row_norms(k_rows, CONFIG.NORMALISE)
    store_number(q_norms, tokens, inside, q_norm)
    store_number(k_norms, tokens, inside, k_norm)
    numerator, cosine_sums = tile_attention(
        nothing(CONFIG.BLOCK, CONFIG.BLOCK_E), q_rows, k_rows, v_rows, unit_factor(q_norm),
        unit_factor(k_norm), scale, slope_of(gain, scale, head, H), CONFIG,
    )  # fmt: skip
    denominator = visible_keys(num_keys, tokens, rows, inside) + cosine_sums
    write_attention(
        of_head(out, head, H), of_head(exact_out, head, H), denominators, tokens, rows, inside,
        numerator, denominator, CONFIG,
    )  # fmt: skip


@triton.jit
def load_factors(norms, tokens, inside):
    """1 / max(|x_i|, NORM_FLOOR) of stored norms."""
    return unit_factor(load_number(norms, tokens, inside))


@triton.jit(do_not_specialize=["H", "N"])
def tile_backward_kernel(
    dout, q, k, v, gain, q_norms, k_norms, denominators, deltas, dslopes, dq, dk, dv, scale, H, N,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """One program a head, all of its tokens at once: dq, then dk, then dv.

    Each loads what it needs (from the cache, after the first): registers don't hold all four inputs at once.
    """
    head = this_head()
    slope = slope_of(gain, scale, head, H)
    rows, inside = tile(0, N, CONFIG.BLOCK)
    tokens = head * N + rows
    q, k, v, dout = of_head(q, head, H), of_head(k, head, H), of_head(v, head, H), of_head(dout, head, H)
    weight, delta = load_quotient_gradients(denominators, deltas, tokens, inside, CONFIG.EQ4)
    q_factor, k_factor = load_factors(q_norms, tokens, inside), load_factors(k_norms, tokens, inside)

    dout_rows = load_rows(dout, rows, inside, CONFIG.E, CONFIG.BLOCK_E)
    k_rows = load_rows(k, rows, inside, CONFIG.D, CONFIG.BLOCK_D)
    v_rows = load_rows(v, rows, inside, CONFIG.E, CONFIG.BLOCK_E)
    dq_unit = nothing(CONFIG.BLOCK, CONFIG.BLOCK_D)
    dq_unit = tile_query_gradients(dq_unit, dout_rows, k_rows, v_rows, k_factor, weight, delta, CONFIG)
    q_rows = load_rows(q, rows, inside, CONFIG.D, CONFIG.BLOCK_D)
    if gain is not None:
        tl.store(dslopes + head, tl.sum(q_factor * tl.sum(q_rows.to(tl.float32) * dq_unit, 1), 0))
    q_norm = load_number(q_norms, tokens, inside)
    dq_rows = through_norm(slope * dq_unit, q_rows, q_norm, CONFIG.NORMALISE)
    store_rows(of_head(dq, head, H), rows, inside, dq_rows, CONFIG.D, CONFIG.BLOCK_D)

    dout_rows = load_rows(dout, rows, inside, CONFIG.E, CONFIG.BLOCK_E)
    q_rows = load_rows(q, rows, inside, CONFIG.D, CONFIG.BLOCK_D)
    v_rows = load_rows(v, rows, inside, CONFIG.E, CONFIG.BLOCK_E)
    dk_unit = nothing(CONFIG.BLOCK, CONFIG.BLOCK_D)
    dk_unit = tile_key_gradients(dk_unit, dout_rows, q_rows, v_rows, q_factor, weight, delta, CONFIG)
    k_rows = load_rows(k, rows, inside, CONFIG.D, CONFIG.BLOCK_D)
    k_norm = load_number(k_norms, tokens, inside)
    dk_rows = through_norm(slope * dk_unit, k_rows, k_norm, CONFIG.NORMALISE)
    store_rows(of_head(dk, head, H), rows, inside, dk_rows, CONFIG.D, CONFIG.BLOCK_D)

    dout_rows = load_rows(dout, rows, inside, CONFIG.E, CONFIG.BLOCK_E)
    q_rows = load_rows(q, rows, inside, CONFIG.D, CONFIG.BLOCK_D)
    k_rows = load_rows(k, rows, inside, CONFIG.D, CONFIG.BLOCK_D)
    dv_rows = nothing(CONFIG.BLOCK, CONFIG.BLOCK_E)
    dv_rows = tile_value_gradients(
        dv_rows, dout_rows, q_rows, k_rows, q_factor, k_factor, weight, scale, slope, CONFIG
    )
    store_rows(of_head(dv, head, H), rows, inside, dv_rows, CONFIG.E, CONFIG.BLOCK_E)
