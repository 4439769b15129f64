"""Device functions of a causal tile, and Triton kernels for Eq. 7 of so few tokens that one tile holds them.

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
)


@triton.jit
def not_later(start, BLOCK: tl.constexpr):
    """L: whether the key of a column comes no later than the query of a row.

    It is the same for every tile, but if it were computed once, it would fill 32 registers all the time.
    """
    rows = start + tl.arange(0, BLOCK)
    return rows[:, None] >= rows[None, :]


@triton.jit
def cosines(x, y, x_factor, y_factor):
    """x^_i.y^_j."""
    return product(x, tl.trans(y)) * x_factor[:, None] * y_factor[None, :]


@triton.jit
def rounded_for(rows, weights, EXACT: tl.constexpr):
    """The weights of a tile, as FlashAttention's: bfloat16 where the rows that they multiply are.

    Unless EXACT: in Eq. 4 gradients of q and k are differences of larger parts, which show such roundings.
    """
    return high(weights) if rows.dtype == tl.bfloat16 and not EXACT else weights


@triton.jit
def tile_attention(numerator, q, k, v, q_factor, k_factor, scale, slope, start, CONFIG: tl.constexpr):
    """numerator + A V, and the sums over the tile's visible keys of q^_i.k^_n."""
    visible = not_later(start, CONFIG.BLOCK)
    cos = cosines(q, k, q_factor, k_factor)
    A = tl.where(visible, scale + slope * cos, 0.0)
    cos = tl.where(visible, cos, 0.0)
    return dot(rounded_for(v, A, CONFIG.EQ4), v, numerator), tl.sum(cos, 1)


@triton.jit
def tile_query_gradients(dq_unit, dout, k, v, k_factor, weight, delta, start, CONFIG: tl.constexpr):
    """dq_unit + dcos K^."""
    dcos = product(dout, tl.trans(v)) * weight[:, None] + delta[:, None]
    dcos = tl.where(not_later(start, CONFIG.BLOCK), dcos, 0.0) * k_factor[None, :]
    return dot(rounded_for(k, dcos, CONFIG.EQ4), k, dq_unit)


@triton.jit
def tile_key_gradients(dk_unit, dout, q, v, q_factor, weight, delta, start, CONFIG: tl.constexpr):
    """dk_unit + dcos^T Q^."""
    seeing = tl.trans(not_later(start, CONFIG.BLOCK))
    # Numbers for each column take many registers: two vectors of them here, not three.
    dcos = product(v, tl.trans(dout)) * (weight * q_factor)[None, :] + (delta * q_factor)[None, :]
    dcos = tl.where(seeing, dcos, 0.0)
    return dot(rounded_for(q, dcos, CONFIG.EQ4), q, dk_unit)


@triton.jit
def tile_value_gradients(
    dv, dout, q, k, q_factor, k_factor, weight, scale, slope, start, CONFIG: tl.constexpr
):
    """dv + A^T G."""
    seeing = tl.trans(not_later(start, CONFIG.BLOCK))
    A = tl.where(seeing, scale + slope * cosines(k, q, k_factor, q_factor), 0.0)
    return dot(rounded_for(dout, A * weight[None, :], CONFIG.EQ4), dout, dv)


@triton.jit
def whole(BLOCK: tl.constexpr):
    """Eq. 7's w_i and delta_i: 1 and 0."""
    return tl.full((BLOCK,), 1.0, tl.float32), tl.zeros((BLOCK,), tl.float32)


@triton.jit(do_not_specialize=["H", "N"])
def tile_forward_kernel(q, k, v, q_norms, k_norms, out, gain, scale, H, N, CONFIG: tl.constexpr):
    """Eq. 7, one program a head, all of its tokens at once."""
    head = this_head()
    first, inside = head * N, tile(0, N, CONFIG.BLOCK)
    q_rows = load_rows(of_head(q, head, H), 0, inside, CONFIG.D, CONFIG.BLOCK_D)
    k_rows = load_rows(of_head(k, head, H), 0, inside, CONFIG.D, CONFIG.BLOCK_D)
    v_rows = load_rows(of_head(v, head, H), 0, inside, CONFIG.E, CONFIG.BLOCK_E)
    q_norm, k_norm = row_norms(q_rows, CONFIG.NORMALISE), row_norms(k_rows, CONFIG.NORMALISE)
    store_number(q_norms, first, inside, q_norm)
    store_number(k_norms, first, inside, k_norm)
    out_rows, _ = tile_attention(
        nothing(CONFIG.BLOCK, CONFIG.BLOCK_E), q_rows, k_rows, v_rows, unit_factor(q_norm),
        unit_factor(k_norm), scale, slope_of(gain, scale, head, H), 0, CONFIG,
    )  # fmt: skip
    store_rows(of_head(out, head, H), 0, inside, out_rows, CONFIG.E, CONFIG.BLOCK_E)


@triton.jit
def load_factors(norms, first, inside):
    """1 / max(|x_i|, NORM_FLOOR) of stored norms."""
    return unit_factor(load_number(norms, first, inside))


@triton.jit
def write_tile_dq(dout, q, k, v, q_norms, k_norms, dq, slope, first, inside, CONFIG: tl.constexpr):
    """Writes dq; returns sum_i q^_i.dq^_i / a, the gradient of a."""
    dout_rows = load_rows(dout, 0, inside, CONFIG.E, CONFIG.BLOCK_E)
    k_rows = load_rows(k, 0, inside, CONFIG.D, CONFIG.BLOCK_D)
    v_rows = load_rows(v, 0, inside, CONFIG.E, CONFIG.BLOCK_E)
    k_factor = load_factors(k_norms, first, inside)
    weight, delta = whole(CONFIG.BLOCK)
    dq_unit = nothing(CONFIG.BLOCK, CONFIG.BLOCK_D)
    dq_unit = tile_query_gradients(dq_unit, dout_rows, k_rows, v_rows, k_factor, weight, delta, 0, CONFIG)
    q_rows = load_rows(q, 0, inside, CONFIG.D, CONFIG.BLOCK_D)
    norm = load_number(q_norms, first, inside)
    dslope = tl.sum(unit_factor(norm) * tl.sum(q_rows.to(tl.float32) * dq_unit, 1), 0)
    dq_rows = through_norm(slope * dq_unit, q_rows, norm, CONFIG.NORMALISE)
    store_rows(dq, 0, inside, dq_rows, CONFIG.D, CONFIG.BLOCK_D)
    return dslope


@triton.jit
def write_tile_dk(dout, q, k, v, q_norms, k_norms, dk, slope, first, inside, CONFIG: tl.constexpr):
    """dk of a head whose tokens are one tile."""
    dout_rows = load_rows(dout, 0, inside, CONFIG.E, CONFIG.BLOCK_E)
    q_rows = load_rows(q, 0, inside, CONFIG.D, CONFIG.BLOCK_D)
    v_rows = load_rows(v, 0, inside, CONFIG.E, CONFIG.BLOCK_E)
    q_factor = load_factors(q_norms, first, inside)
    weight, delta = whole(CONFIG.BLOCK)
    dk_unit = nothing(CONFIG.BLOCK, CONFIG.BLOCK_D)
    dk_unit = tile_key_gradients(dk_unit, dout_rows, q_rows, v_rows, q_factor, weight, delta, 0, CONFIG)
    k_rows = load_rows(k, 0, inside, CONFIG.D, CONFIG.BLOCK_D)
    norm = load_number(k_norms, first, inside)
    dk_rows = through_norm(slope * dk_unit, k_rows, norm, CONFIG.NORMALISE)
    store_rows(dk, 0, inside, dk_rows, CONFIG.D, CONFIG.BLOCK_D)


@triton.jit
def write_tile_dv(dout, q, k, q_norms, k_norms, dv, scale, slope, first, inside, CONFIG: tl.constexpr):
    """dv of a head whose tokens are one tile."""
    dout_rows = load_rows(dout, 0, inside, CONFIG.E, CONFIG.BLOCK_E)
    q_rows = load_rows(q, 0, inside, CONFIG.D, CONFIG.BLOCK_D)
    k_rows = load_rows(k, 0, inside, CONFIG.D, CONFIG.BLOCK_D)
    q_factor, k_factor = load_factors(q_norms, first, inside), load_factors(k_norms, first, inside)
    weight, _ = whole(CONFIG.BLOCK)
    dv_rows = tile_value_gradients(
        nothing(CONFIG.BLOCK, CONFIG.BLOCK_E), dout_rows, q_rows, k_rows, q_factor, k_factor, weight,
        scale, slope, 0, CONFIG,
    )  # fmt: skip
    store_rows(dv, 0, inside, dv_rows, CONFIG.E, CONFIG.BLOCK_E)


@triton.jit(do_not_specialize=["H", "N"])
def tile_backward_kernel(
    dout, q, k, v, q_norms, k_norms, dslopes, dq, dk, dv, gain, scale, H, N, CONFIG: tl.constexpr
):
    """Eq. 7, one program a head, all of its tokens at once: dq, then dk, then dv.

    Each loads what it needs (from the cache, after the first): registers don't hold all of it at once.
    """
    head = this_head()
    slope = slope_of(gain, scale, head, H)
    first, inside = head * N, tile(0, N, CONFIG.BLOCK)
    q, k, v, dout = of_head(q, head, H), of_head(k, head, H), of_head(v, head, H), of_head(dout, head, H)
    dq, dk, dv = of_head(dq, head, H), of_head(dk, head, H), of_head(dv, head, H)
    dslope = write_tile_dq(dout, q, k, v, q_norms, k_norms, dq, slope, first, inside, CONFIG)
    if gain is not None:
        tl.store(dslopes + head, dslope)
    tl.debug_barrier()
    write_tile_dk(dout, q, k, v, q_norms, k_norms, dk, slope, first, inside, CONFIG)
    tl.debug_barrier()
    write_tile_dv(dout, q, k, q_norms, k_norms, dv, scale, slope, first, inside, CONFIG)
