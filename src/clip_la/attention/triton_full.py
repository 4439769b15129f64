"""Triton kernels where every query sees every key, and how they are launched.

With S = sum_n k^_n v_n^T, z = sum_n v_n, kappa = sum_n k^_n (Eq. 4) and a = scale gain,

    out_i = w_i (scale z + a S^T q^_i),    w_i = 1, or in Eq. 4 1 / (num_keys_i + kappa.q^_i)

and with G_i = w_i dout_i and delta_i, the gradient of Eq. 4's denominator,

    dS = sum_i q^_i G_i^T,    dz = sum_i G_i,    dkappa = sum_i delta_i q^_i
    dq^_i = a S G_i + delta_i kappa,    dk^_n = a dS v_n + dkappa,    dv_n = a dS^T k^_n + scale dz

If v_n less the mean of the M values is to take the place of v_n, S is the same for v_n - c as for v_n:

    S = sum_n k^_n (v_n - c)^T - kappa z^T / M,    z = sum_n (v_n - c)
    dk^_n = a dS (v_n - mean),    dv_n = a dS^T (k^_n - kappa / M)

and 0 then takes the place of z. With c, the mean of the first tile, near that of all, the bfloat16 parts of
v_n - c hold what is left after the mean. dv gets a constant row in place of scale dz.

One program a head makes both passes, one over the keys and one over the queries. Few heads of many tokens
would leave the GPU idle: then each pass is a launch over groups of tokens, and the groups' sums are added up
in between, always in the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from clip_la.attention.triton_parts import (
    add_tokens,
    first_mean,
    high,
    load_kappa,
    load_number,
    load_quotient_gradients,
    load_rows,
    load_sums,
    load_transposed_state,
    load_vector,
    no_sums,
    of_head,
    product,
    row_norms,
    slope_of,
    store_number,
    store_rows,
    store_state,
    store_sums,
    store_vector,
    sum_tokens,
    this_head,
    through_norm,
    tile,
    unit_factor,
    write_attention,
    zeros,
)


@triton.jit
def attend(
    q, out, exact_out, q_norms, denominators, num_keys, M, first_token, begin, end, S, z, kappa, scale, slope,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Writes out_i = w_i (scale z + a S^T q^_i) of the queries begin..end."""
    for start in range(begin, end, CONFIG.BLOCK):
        inside = tile(start, end, CONFIG.BLOCK)
        q_rows = load_rows(q, start, inside, CONFIG.D, CONFIG.BLOCK_D)
        norm = row_norms(q_rows, CONFIG.NORMALISE)
        store_number(q_norms, first_token + start, inside, norm)
        numerator = product(q_rows, S) * (slope * unit_factor(norm))[:, None] + (scale * z)[None, :]
        denominator = norm
        if CONFIG.EQ4:
            denominator = unit_factor(norm) * tl.sum(q_rows.to(tl.float32) * kappa[None, :], 1)
            denominator += M if num_keys is None else load_number(num_keys, first_token + start, inside)
        write_attention(
            out, exact_out, denominators, first_token + start, start, inside, numerator, denominator, CONFIG
        )


@triton.jit
def query_gradients(
    dout, q, q_norms, denominators, deltas, dq, first_token, begin, end, S_transposed, kappa, slope,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """Writes dq of the queries begin..end; their dS, dz, dkappa and sum_i q^_i.(S G_i), the gradient of a."""
    dS, dz, dkappa = no_sums(CONFIG.BLOCK_D, CONFIG.BLOCK_E)
    dslope = zeros(CONFIG.BLOCK)
    for start in range(begin, end, CONFIG.BLOCK):
        inside = tile(start, end, CONFIG.BLOCK)
        q_rows = load_rows(q, start, inside, CONFIG.D, CONFIG.BLOCK_D)
        dout_rows = load_rows(dout, start, inside, CONFIG.E, CONFIG.BLOCK_E)
        norm = load_number(q_norms, first_token + start, inside)
        factor = unit_factor(norm)
        weight, delta = load_quotient_gradients(denominators, deltas, first_token + start, inside, CONFIG.EQ4)
        dq_unit = product(dout_rows, S_transposed) * weight[:, None]
        dslope += factor * tl.sum(q_rows.to(tl.float32) * dq_unit, 1)
        dq_unit *= slope
        if CONFIG.EQ4:
            dq_unit += delta[:, None] * kappa[None, :]
        dq_rows = through_norm(dq_unit, q_rows, norm, CONFIG.NORMALISE)
        store_rows(dq, start, inside, dq_rows, CONFIG.D, CONFIG.BLOCK_D)
        dS, dz, dkappa = add_tokens(
            dS, dz, dkappa, q_rows, dout_rows, factor, weight, delta, CONFIG.EQ4, not CONFIG.CENTRE
        )
    return dS, dz, dkappa, tl.sum(dslope, 0)


@triton.jit
def centred(rows, mean):
    """Rows less their mean, rounded to the dtype that they came in."""
    if rows.dtype == tl.bfloat16:
        left = high(rows.to(tl.float32) - mean[None, :])
    else:
        left = (rows.to(tl.float32) - mean[None, :]).to(rows.dtype)
    return left


@triton.jit
def value_row(dS, dz, key_sum, scale, slope, M, CONFIG: tl.constexpr):
    """What every dv gets: scale dz, or, of centred values, -a dS^T kappa / M."""
    if CONFIG.CENTRE:
        row = tl.sum(dS * (load_kappa(key_sum, CONFIG) * (-slope / tl.maximum(M, 1)))[:, None], 0)
    else:
        row = scale * dz
    return row


@triton.jit
def key_gradients(
    k, v, k_norms, key_sum, value_mean, dk, dv, first_token, begin, end, M, dS, dS_transposed, dz, dkappa,
    scale, slope, CONFIG: tl.constexpr,
):  # fmt: skip
    """Writes dk and dv of the keys begin..end."""
    dv_row = value_row(dS, dz, key_sum, scale, slope, M, CONFIG)
    for start in range(begin, end, CONFIG.BLOCK):
        inside = tile(start, end, CONFIG.BLOCK)
        k_rows = load_rows(k, start, inside, CONFIG.D, CONFIG.BLOCK_D)
        v_rows = load_rows(v, start, inside, CONFIG.E, CONFIG.BLOCK_E)
        if CONFIG.CENTRE:
            v_rows = centred(v_rows, load_vector(value_mean, CONFIG.E, CONFIG.BLOCK_E))
        norm = load_number(k_norms, first_token + start, inside)
        dk_unit = slope * product(v_rows, dS_transposed)
        if CONFIG.EQ4:
            dk_unit += dkappa[None, :]
        dk_rows = through_norm(dk_unit, k_rows, norm, CONFIG.NORMALISE)
        store_rows(dk, start, inside, dk_rows, CONFIG.D, CONFIG.BLOCK_D)
        dv_rows = product(k_rows, dS) * (slope * unit_factor(norm))[:, None] + dv_row[None, :]
        store_rows(dv, start, inside, dv_rows, CONFIG.E, CONFIG.BLOCK_E)


@triton.jit(do_not_specialize=["H", "N", "M"])
def full_forward_kernel(
    q, num_keys, out, exact_out, q_norms, denominators, k, v, k_norms, state, key_sum, value_mean,
    gain, scale, H, N, M, CONFIG: tl.constexpr,
):  # fmt: skip
    """One program a head: the sums over its keys, then its queries."""
    head = this_head()
    shift = None
    if CONFIG.CENTRE:
        shift = first_mean(of_head(v, head, H), M, CONFIG)
    S, z, kappa = sum_tokens(
        of_head(k, head, H), of_head(v, head, H), k_norms, None, None, shift, head * M, 0, M, CONFIG
    )
    if CONFIG.CENTRE:
        z /= tl.maximum(M, 1)
        S -= kappa[:, None] * z[None, :]
        store_vector(value_mean + head * CONFIG.E, shift + z, CONFIG.E, CONFIG.BLOCK_E)
        z = zeros(CONFIG.BLOCK_E)
    store_state(state + head * (CONFIG.D * CONFIG.E), S, CONFIG)
    if CONFIG.SUM_KEYS:
        store_vector(key_sum + head * CONFIG.D, kappa, CONFIG.D, CONFIG.BLOCK_D)
    attend(
        of_head(q, head, H), of_head(out, head, H), of_head(exact_out, head, H), q_norms, denominators,
        num_keys, M, head * N, 0, N, S, z, kappa, scale, slope_of(gain, scale, head, H), CONFIG,
    )  # fmt: skip


@triton.jit(do_not_specialize=["H", "N", "M", "group"])
def queries_kernel(
    q, num_keys, out, exact_out, q_norms, denominators, sums, gain, scale, H, N, M, group,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """The queries of each group, from the sums over all keys."""
    head, index = this_head(), tl.program_id(1)
    S, z, kappa = load_sums(sums, head, CONFIG)
    attend(
        of_head(q, head, H), of_head(out, head, H), of_head(exact_out, head, H), q_norms, denominators,
        num_keys, M, head * N, index * group, tl.minimum((index + 1) * group, N),
        S, z, kappa, scale, slope_of(gain, scale, head, H), CONFIG,
    )  # fmt: skip


@triton.jit(do_not_specialize=["H", "N", "M"])
def full_backward_kernel(
    dout, q, state, key_sum, q_norms, denominators, deltas, dsums, dslopes, dq,
    k, v, k_norms, value_mean, dk, dv, gain, scale, H, N, M, CONFIG: tl.constexpr,
):  # fmt: skip
    """One program a head: its queries' gradients and the sums that these make, then its keys' and values'.

    dS is read back from memory, where it is in the cache, because its transpose is needed too.
    """
    head = this_head()
    slope = slope_of(gain, scale, head, H)
    state += head * (CONFIG.D * CONFIG.E)
    dsums += head * CONFIG.NUM_SUMS
    dS, dz, dkappa, dslope = query_gradients(
        of_head(dout, head, H), of_head(q, head, H), q_norms, denominators, deltas,
        of_head(dq, head, H), head * N, 0, N, load_transposed_state(state, CONFIG),
        load_kappa(key_sum + head * CONFIG.D, CONFIG), slope, CONFIG,
    )  # fmt: skip
    if gain is not None:
        tl.store(dslopes + head, dslope)
    store_state(dsums, dS, CONFIG)
    tl.debug_barrier()
    key_gradients(
        of_head(k, head, H), of_head(v, head, H), k_norms,
        key_sum + head * CONFIG.D, value_mean + head * CONFIG.E,
        of_head(dk, head, H), of_head(dv, head, H), head * M, 0, M, M,
        dS, load_transposed_state(dsums, CONFIG), dz, dkappa, scale, slope_of(gain, scale, head, H), CONFIG,
    )  # fmt: skip


@triton.jit(do_not_specialize=["H", "N", "group"])
def query_gradients_kernel(
    dout, q, state, key_sum, q_norms, denominators, deltas, dsums, dslopes, dq, gain, scale, H, N, group,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """dq of each group of queries, and the group's part of dS, dz, dkappa and the gain's gradient."""
    head, index = this_head(), tl.program_id(1)
    dS, dz, dkappa, dslope = query_gradients(
        of_head(dout, head, H), of_head(q, head, H), q_norms, denominators, deltas,
        of_head(dq, head, H), head * N, index * group, tl.minimum((index + 1) * group, N),
        load_transposed_state(state + head * (CONFIG.D * CONFIG.E), CONFIG),
        load_kappa(key_sum + head * CONFIG.D, CONFIG), slope_of(gain, scale, head, H), CONFIG,
    )  # fmt: skip
    place = head * tl.num_programs(1) + index
    store_sums(dsums, place, dS, dz, dkappa, CONFIG)
    if gain is not None:
        tl.store(dslopes + place, dslope)


@triton.jit(do_not_specialize=["H", "M", "group"])
def key_gradients_kernel(
    k, v, k_norms, value_mean, dk, dv, key_sum, dsums, gain, scale, H, M, group, CONFIG: tl.constexpr
):  # fmt: skip
    """dk and dv of each group of keys, from the sums over all queries."""
    head, index = this_head(), tl.program_id(1)
    dS, dz, dkappa = load_sums(dsums, head, CONFIG)
    key_gradients(
        of_head(k, head, H), of_head(v, head, H), k_norms,
        key_sum + head * CONFIG.D, value_mean + head * CONFIG.E, of_head(dk, head, H), of_head(dv, head, H),
        head * M, index * group, tl.minimum((index + 1) * group, M), M,
        dS, load_transposed_state(dsums + head * CONFIG.NUM_SUMS, CONFIG), dz, dkappa,
        scale, slope_of(gain, scale, head, H), CONFIG,
    )  # fmt: skip
