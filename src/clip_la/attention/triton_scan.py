"""Triton kernels for causal attention of any length: sums carried from one chunk of tokens to the next.

To what `triton_causal` computes within a chunk come the chunks before it, through their sums S, z and kappa,
and for dk and dv those after it, through dS, dz and dkappa (all as in `triton_full`):

    out_i = w_i ((A V)_i + a S^T q^_i + scale z)
    dq^_i = a ((dcos K^)_i + S G_i) + delta_i kappa
    dk^_n = a ((dcos^T Q^)_n + dS v_n) + dkappa,    dv_n = (A^T G)_n + a dS^T k^_n + scale dz

One program a head goes through its chunks. Few heads of many tokens would leave the GPU idle: then a first
launch sums up groups of chunks, a second makes of each group's sums those of all groups before (or after) it,
and one program a group starts from there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from clip_la.attention.triton_causal import (
    tile_attention,
    tile_key_gradients,
    tile_query_gradients,
    tile_value_gradients,
)
from clip_la.attention.triton_parts import (
    add_tokens,
    dot,
    inverse,
    load_kappa,
    load_number,
    load_quotient_gradients,
    load_rows,
    load_sums,
    load_transposed_state,
    no_sums,
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
    zeros,
)


@triton.jit
def visible_keys(num_keys, first, start, inside):
    """How many keys each query sees: all up to itself, unless padded."""
    up_to_itself = (start + 1 + tl.arange(0, inside.shape[0])).to(tl.float32)
    return load_number(num_keys, first, inside) if num_keys is not None else up_to_itself


@triton.jit(do_not_specialize=["num_groups"])
def exclusive_sums_kernel(sums, num_groups, REVERSE: tl.constexpr, BLOCK: tl.constexpr, CONFIG: tl.constexpr):
    """In place of each group's sums those of all groups before it, or after it, one group after another."""
    head = this_head()
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(num_groups):
        index = num_groups - 1 - i if REVERSE else i
        pointers = sums + (head * num_groups + index) * CONFIG.NUM_SUMS + columns
        values = tl.load(pointers, mask=columns < CONFIG.NUM_SUMS, other=0.0)
        tl.store(pointers, total, mask=columns < CONFIG.NUM_SUMS)
        total += values


@triton.jit(do_not_specialize=["H", "N", "group"])
def scan_forward_kernel(
    q, k, v, num_keys, out, exact_out, q_norms, k_norms, denominators, earlier, gain, scale, H, N, group,
    CONFIG: tl.constexpr,
):  # fmt: skip
    """The chunks of a group from the first to the last, after those that `earlier` holds the sums of."""
    head, index = this_head(), tl.program_id(1)
    slope = slope_of(gain, scale, head, H)
    q, k, v = of_head(q, head, H), of_head(k, head, H), of_head(v, head, H)
    out, exact_out = of_head(out, head, H), of_head(exact_out, head, H)
    S, z, kappa = no_sums(CONFIG.BLOCK_D, CONFIG.BLOCK_E)
    if earlier is not None:
        S, z, kappa = load_sums(earlier, head * tl.num_programs(1) + index, CONFIG)
    for start in range(index * group, tl.minimum((index + 1) * group, N), CONFIG.BLOCK):
        inside = tile(start, N, CONFIG.BLOCK)
        first = head * N + start
        q_rows = load_rows(q, start, inside, CONFIG.D, CONFIG.BLOCK_D)
        q_norm = row_norms(q_rows, CONFIG.NORMALISE)
        store_number(q_norms, first, inside, q_norm)
        q_factor = unit_factor(q_norm)
        numerator = product(q_rows, S) * (slope * q_factor)[:, None] + (scale * z)[None, :]
        denominator = visible_keys(num_keys, first, start, inside)
        if CONFIG.EQ4:
            denominator += q_factor * tl.sum(q_rows.to(tl.float32) * kappa[None, :], 1)
        tl.debug_barrier()
        k_rows = load_rows(k, start, inside, CONFIG.D, CONFIG.BLOCK_D)
        v_rows = load_rows(v, start, inside, CONFIG.E, CONFIG.BLOCK_E)
        k_norm = row_norms(k_rows, CONFIG.NORMALISE)
        store_number(k_norms, first, inside, k_norm)
        numerator, cosine_sums = tile_attention(
            numerator, q_rows, k_rows, v_rows, q_factor, unit_factor(k_norm), scale, slope, start, CONFIG
        )
        denominator += cosine_sums
        write_attention(out, exact_out, denominators, first, start, inside, numerator, denominator, CONFIG)
        tl.debug_barrier()
        k_rows = load_rows(k, start, inside, CONFIG.D, CONFIG.BLOCK_D)
        v_rows = load_rows(v, start, inside, CONFIG.E, CONFIG.BLOCK_E)
        k_factor = unit_factor(row_norms(k_rows, CONFIG.NORMALISE))
        ones = tl.full(k_factor.shape, 1.0, tl.float32)
        S, z, kappa = add_tokens(S, z, kappa, k_rows, v_rows, k_factor, ones, ones, CONFIG.EQ4)


@triton.jit(do_not_specialize=["H", "N", "group"])
def scan_query_gradients_kernel(
    dout, q, k, v, denominators, deltas, earlier, dslopes, dq, gain, scale, H, N, group, CONFIG: tl.constexpr
):
    """dq of the chunks of a group from the first to the last; S is summed transposed, as it is used."""
    head, index = this_head(), tl.program_id(1)
    place = head * tl.num_programs(1) + index
    slope = slope_of(gain, scale, head, H)
    q, k, v, dout = of_head(q, head, H), of_head(k, head, H), of_head(v, head, H), of_head(dout, head, H)
    dq = of_head(dq, head, H)
    S_transposed = nothing(CONFIG.BLOCK_E, CONFIG.BLOCK_D)
    kappa = zeros(CONFIG.BLOCK_D)
    if earlier is not None:
        S_transposed = load_transposed_state(earlier + place * CONFIG.NUM_SUMS, CONFIG)
        kappa = load_kappa(earlier + place * CONFIG.NUM_SUMS + (CONFIG.D + 1) * CONFIG.E, CONFIG)
    dslope = zeros(CONFIG.BLOCK)
    for start in range(index * group, tl.minimum((index + 1) * group, N), CONFIG.BLOCK):
        inside = tile(start, N, CONFIG.BLOCK)
        dout_rows = load_rows(dout, start, inside, CONFIG.E, CONFIG.BLOCK_E)
        weight, delta = load_quotient_gradients(denominators, deltas, head * N + start, inside, CONFIG.EQ4)
        dq_unit = product(dout_rows, S_transposed) * weight[:, None]
        tl.debug_barrier()
        k_rows = load_rows(k, start, inside, CONFIG.D, CONFIG.BLOCK_D)
        v_rows = load_rows(v, start, inside, CONFIG.E, CONFIG.BLOCK_E)
        k_factor = unit_factor(row_norms(k_rows, CONFIG.NORMALISE))
        dq_unit = tile_query_gradients(
            dq_unit, dout_rows, k_rows, v_rows, k_factor, weight, delta, start, CONFIG
        )
        q_rows = load_rows(q, start, inside, CONFIG.D, CONFIG.BLOCK_D)
        q_norm = row_norms(q_rows, CONFIG.NORMALISE)
        dslope += unit_factor(q_norm) * tl.sum(q_rows.to(tl.float32) * dq_unit, 1)
        dq_unit *= slope
        if CONFIG.EQ4:
            dq_unit += delta[:, None] * kappa[None, :]
        dq_rows = through_norm(dq_unit, q_rows, q_norm, CONFIG.NORMALISE)
        store_rows(dq, start, inside, dq_rows, CONFIG.D, CONFIG.BLOCK_D)
        tl.debug_barrier()
        k_rows = load_rows(k, start, inside, CONFIG.D, CONFIG.BLOCK_D)
        v_rows = load_rows(v, start, inside, CONFIG.E, CONFIG.BLOCK_E)
        k_unit = k_rows.to(tl.float32) * unit_factor(row_norms(k_rows, CONFIG.NORMALISE))[:, None]
        S_transposed = dot(tl.trans(v_rows), k_unit, S_transposed)
        if CONFIG.EQ4:
            kappa += tl.sum(k_unit, 0)
    if gain is not None:
        tl.store(dslopes + place, tl.sum(dslope, 0))


@triton.jit
def chunk_from_end(chunks_after, index, group, N, CONFIG: tl.constexpr):
    """First token of the chunk of a group that has so many after it."""
    num_chunks = tl.cdiv(tl.minimum(group, N - index * group), CONFIG.BLOCK)
    return index * group + (num_chunks - 1 - chunks_after) * CONFIG.BLOCK


@triton.jit(do_not_specialize=["H", "N", "group"])
def scan_key_gradients_kernel(
    dout, q, k, v, denominators, deltas, later, dk, gain, scale, H, N, group, CONFIG: tl.constexpr
):
    """dk of the chunks of a group from the last to the first; dS is summed transposed, as it is used."""
    head, index = this_head(), tl.program_id(1)
    slope = slope_of(gain, scale, head, H)
    q, k, v, dout = of_head(q, head, H), of_head(k, head, H), of_head(v, head, H), of_head(dout, head, H)
    dk = of_head(dk, head, H)
    dS_transposed = nothing(CONFIG.BLOCK_E, CONFIG.BLOCK_D)
    dkappa = zeros(CONFIG.BLOCK_D)
    if later is not None:
        later += (head * tl.num_programs(1) + index) * CONFIG.NUM_SUMS
        dS_transposed = load_transposed_state(later, CONFIG)
        dkappa = load_kappa(later + (CONFIG.D + 1) * CONFIG.E, CONFIG)
    for chunks_after in range(tl.cdiv(tl.minimum(group, N - index * group), CONFIG.BLOCK)):
        start = chunk_from_end(chunks_after, index, group, N, CONFIG)
        inside = tile(start, N, CONFIG.BLOCK)
        first = head * N + start
        v_rows = load_rows(v, start, inside, CONFIG.E, CONFIG.BLOCK_E)
        dk_unit = product(v_rows, dS_transposed)
        tl.debug_barrier()
        q_rows = load_rows(q, start, inside, CONFIG.D, CONFIG.BLOCK_D)
        dout_rows = load_rows(dout, start, inside, CONFIG.E, CONFIG.BLOCK_E)
        q_factor = unit_factor(row_norms(q_rows, CONFIG.NORMALISE))
        weight, delta = load_quotient_gradients(denominators, deltas, first, inside, CONFIG.EQ4)
        dk_unit = tile_key_gradients(
            dk_unit, dout_rows, q_rows, v_rows, q_factor, weight, delta, start, CONFIG
        )
        dk_unit *= slope
        if CONFIG.EQ4:
            dk_unit += dkappa[None, :]
        k_rows = load_rows(k, start, inside, CONFIG.D, CONFIG.BLOCK_D)
        dk_rows = through_norm(dk_unit, k_rows, row_norms(k_rows, CONFIG.NORMALISE), CONFIG.NORMALISE)
        store_rows(dk, start, inside, dk_rows, CONFIG.D, CONFIG.BLOCK_D)
        tl.debug_barrier()
        q_rows = load_rows(q, start, inside, CONFIG.D, CONFIG.BLOCK_D)
        dout_rows = load_rows(dout, start, inside, CONFIG.E, CONFIG.BLOCK_E)
        q_unit = q_rows.to(tl.float32) * unit_factor(row_norms(q_rows, CONFIG.NORMALISE))[:, None]
        weight, delta = load_quotient_gradients(denominators, deltas, first, inside, CONFIG.EQ4)
        dS_transposed = dot(tl.trans(dout_rows), q_unit * weight[:, None], dS_transposed)
        if CONFIG.EQ4:
            dkappa += tl.sum(q_unit * delta[:, None], 0)


@triton.jit(do_not_specialize=["H", "N", "group"])
def scan_value_gradients_kernel(
    dout, q, k, denominators, later, dv, gain, scale, H, N, group, CONFIG: tl.constexpr
):
    """dv of the chunks of a group from the last to the first."""
    head, index = this_head(), tl.program_id(1)
    slope = slope_of(gain, scale, head, H)
    q, k = of_head(q, head, H), of_head(k, head, H)
    dout, dv = of_head(dout, head, H), of_head(dv, head, H)
    dS, dz, dkappa = no_sums(CONFIG.BLOCK_D, CONFIG.BLOCK_E)
    if later is not None:
        dS, dz, dkappa = load_sums(later, head * tl.num_programs(1) + index, CONFIG)
    for chunks_after in range(tl.cdiv(tl.minimum(group, N - index * group), CONFIG.BLOCK)):
        start = chunk_from_end(chunks_after, index, group, N, CONFIG)
        inside = tile(start, N, CONFIG.BLOCK)
        first = head * N + start
        k_rows = load_rows(k, start, inside, CONFIG.D, CONFIG.BLOCK_D)
        k_factor = unit_factor(row_norms(k_rows, CONFIG.NORMALISE))
        dv_rows = product(k_rows, dS) * (slope * k_factor)[:, None] + (scale * dz)[None, :]
        tl.debug_barrier()
        q_rows = load_rows(q, start, inside, CONFIG.D, CONFIG.BLOCK_D)
        dout_rows = load_rows(dout, start, inside, CONFIG.E, CONFIG.BLOCK_E)
        q_factor = unit_factor(row_norms(q_rows, CONFIG.NORMALISE))
        weight = inverse(load_number(denominators, first, inside), CONFIG.EQ4)
        dv_rows = tile_value_gradients(
            dv_rows, dout_rows, q_rows, k_rows, q_factor, k_factor, weight, scale, slope, start, CONFIG
        )
        store_rows(dv, start, inside, dv_rows, CONFIG.E, CONFIG.BLOCK_E)
        tl.debug_barrier()
        q_rows = load_rows(q, start, inside, CONFIG.D, CONFIG.BLOCK_D)
        dout_rows = load_rows(dout, start, inside, CONFIG.E, CONFIG.BLOCK_E)
        q_factor = unit_factor(row_norms(q_rows, CONFIG.NORMALISE))
        weight = inverse(load_number(denominators, first, inside), CONFIG.EQ4)
        dS, dz, dkappa = add_tokens(dS, dz, dkappa, q_rows, dout_rows, q_factor, weight, weight, False)
