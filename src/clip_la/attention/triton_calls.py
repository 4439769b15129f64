"""Which kernels a call launches, on how many programs, and in tiles of which size."""

from __future__ import annotations

import torch
from torch import Tensor

from clip_la.attention.contract import Forward, Gradients, Options
from clip_la.attention.triton_causal import tile_backward_kernel, tile_forward_kernel
from clip_la.attention.triton_full import (
    full_backward_kernel,
    full_forward_kernel,
    key_gradients_kernel,
    queries_kernel,
    query_gradients_kernel,
)
from clip_la.attention.triton_launch import Config, config_of, launch, num_groups, optional, padded, view
from clip_la.attention.triton_parts import denominator_gradients_kernel, group_sums_kernel
from clip_la.attention.triton_scan import (
    exclusive_sums_kernel,
    scan_forward_kernel,
    scan_key_gradients_kernel,
    scan_query_gradients_kernel,
    scan_value_gradients_kernel,
)

TILE = 128
"""Most tokens of a causal call that is one tile: a text has 77."""

_SCAN_BLOCK = 1024
"""Numbers that a program of `exclusive_sums_kernel` adds up."""


def fits_tile(q: Tensor, v: Tensor, options: Options) -> bool:
    """Whether a causal call is one tile; others have too many tokens, or would overfill the registers."""
    in_registers = _is_small(q, v) and q.dtype == torch.bfloat16 and not options.has_denominator
    return q.shape[2] <= TILE and in_registers


def denominator_gradients(dout: Tensor, q: Tensor, saved: Forward, options: Options) -> Tensor | None:
    """Of Eq. 4's denominators, (B, H, N); Eq. 7 has none. saved.out is the output before rounding."""
    if not options.has_denominator:
        return None
    B, H, N, _ = dout.shape
    deltas, config = _empty(B, H, N, device=dout.device), _full_config(q, dout, options)
    grid = (B * H, (N + config.BLOCK - 1) // config.BLOCK)
    inputs = (view(dout), view(saved.out), saved.denominator)
    launch(denominator_gradients_kernel, grid, *inputs, deltas, H, N, config=config)
    return deltas


def forward_full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    num_keys: Tensor | None,
    options: Options,
    result: Forward,
) -> None:
    """Fill `result`, not causal."""
    (B, H, N, _), M, device = q.shape, k.shape[2], q.device
    scale, config = options.constant(M), _full_config(q, v, options)
    exact_out = result.exact_out if config.KEEP_EXACT else result.out
    outputs = (view(result.out), view(exact_out))
    q_norms, k_norms = optional(result.q_norm), optional(result.k_norm)
    denominators = optional(result.denominator)
    groups = num_groups(B * H, min(N, M), device)
    if groups == 1:
        launch(
            full_forward_kernel, (B * H,), view(q), view(k), view(v), gain, num_keys, *outputs, result.state,
            result.key_sum, q_norms, k_norms, denominators, scale, H, N, M, config=config,
        )  # fmt: skip
        return
    sums = _group_sums(k, v, k_norms, None, None, groups, config).sum(1)
    S, _, kappa = sums.tensor_split((config.D * config.E, (config.D + 1) * config.E), dim=-1)
    result.state.copy_(S.view_as(result.state))
    if options.has_denominator:
        result.key_sum.copy_(kappa.view_as(result.key_sum))
    launch(
        queries_kernel, (B * H, groups), view(q), gain, num_keys, *outputs, q_norms, denominators, sums,
        scale, H, N, M, config.group_size(N, groups), config=config,
    )  # fmt: skip


def backward_full(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    deltas: Tensor | None,
    saved: Forward,
    options: Options,
    result: Gradients,
) -> None:
    """Fill `result`, not causal; deltas from `denominator_gradients`."""
    (B, H, N, _), M, device = q.shape, k.shape[2], q.device
    scale, config = options.constant(M), _full_config(q, v, options)
    q_norms, k_norms = optional(saved.q_norm), optional(saved.k_norm)
    denominators = optional(saved.denominator)
    groups = num_groups(B * H, min(N, M), device)
    dslopes = _empty(B, H, groups, device=device)
    dsums = _empty(B * H, groups, config.NUM_SUMS, device=device)
    dq, dk, dv = view(result.dq), view(result.dk), view(result.dv)
    if groups == 1:
        launch(
            full_backward_kernel, (B * H,), view(dout), view(q), view(k), view(v), gain, saved.state,
            saved.key_sum, q_norms, k_norms, denominators, deltas, dsums, dslopes, dq, dk, dv,
            scale, H, N, M, config=config,
        )  # fmt: skip
    else:
        launch(
            query_gradients_kernel, (B * H, groups), view(dout), view(q), gain, saved.state,
            saved.key_sum, q_norms, denominators, deltas, dsums, dslopes, dq,
            scale, H, N, config.group_size(N, groups), config=config,
        )  # fmt: skip
        launch(
            key_gradients_kernel, (B * H, groups), view(k), view(v), gain, k_norms, dsums.sum(1), dk, dv,
            scale, H, M, config.group_size(M, groups), config=config,
        )  # fmt: skip
    _write_gain_gradient(result, dslopes, scale)


def forward_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    num_keys: Tensor | None,
    options: Options,
    result: Forward,
) -> None:
    """Fill `result`, causal, where `fits_tile`; num_keys is Eq. 4's."""
    B, H, N, _ = q.shape
    launch(
        tile_forward_kernel, (B * H,), view(q), view(k), view(v), gain, view(result.out),
        result.q_norm, result.k_norm, options.constant(N), H, N, config=_tile_config(q, v, options),
    )  # fmt: skip


def backward_tile(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    deltas: Tensor | None,
    saved: Forward,
    options: Options,
    result: Gradients,
) -> None:
    """Fill `result`, causal, where `fits_tile`; deltas are Eq. 4's."""
    B, H, N, _ = q.shape
    scale = options.constant(N)
    dslopes = _empty(B, H, 1, device=q.device)
    launch(
        tile_backward_kernel, (B * H,), view(dout), view(q), view(k), view(v), gain, saved.q_norm,
        saved.k_norm, dslopes, view(result.dq), view(result.dk), view(result.dv), scale, H, N,
        config=_tile_config(q, v, options),
    )  # fmt: skip
    _write_gain_gradient(result, dslopes, scale)


def forward_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    num_keys: Tensor | None,
    options: Options,
    result: Forward,
) -> None:
    """Fill `result`, causal."""
    B, H, N, _ = q.shape
    config, groups = _scan_config(q, v, options), num_groups(B * H, N, q.device)
    exact_out = result.exact_out if config.KEEP_EXACT else result.out
    earlier = _sums_beside(k, v, None, None, groups, config)
    launch(
        scan_forward_kernel, (B * H, groups), view(q), view(k), view(v), gain, num_keys, view(result.out),
        view(exact_out), optional(result.q_norm), optional(result.k_norm), optional(result.denominator),
        earlier, options.constant(N), H, N, config.group_size(N, groups), config=config,
    )  # fmt: skip


def backward_scan(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    deltas: Tensor | None,
    saved: Forward,
    options: Options,
    result: Gradients,
) -> None:
    """Fill `result`, causal; deltas from `denominator_gradients`."""
    B, H, N, _ = q.shape
    scale, denominators = options.constant(N), optional(saved.denominator)
    config, groups = _scan_config(q, v, options), num_groups(B * H, N, q.device)
    size = config.group_size(N, groups)
    dslopes = _empty(B, H, groups, device=q.device)
    norms = (optional(saved.q_norm), optional(saved.k_norm))
    inputs = (view(dout), view(q), view(k), view(v), gain, *norms, denominators, deltas)
    earlier = _sums_beside(k, v, None, None, groups, config)
    launch(
        scan_query_gradients_kernel, (B * H, groups), *inputs, earlier, dslopes, view(result.dq),
        scale, H, N, size, config=config,
    )  # fmt: skip
    later = _sums_beside(q, dout, denominators, deltas, groups, config, reverse=True)
    launch(
        scan_key_gradients_kernel, (B * H, groups), *inputs, later, view(result.dk),
        scale, H, N, size, config=config,
    )  # fmt: skip
    launch(
        scan_value_gradients_kernel, (B * H, groups), view(dout), view(q), view(k), gain, *norms,
        denominators, later, view(result.dv), scale, H, N, size, config=config,
    )  # fmt: skip
    _write_gain_gradient(result, dslopes, scale)


def _group_sums(
    x: Tensor,
    y: Tensor,
    norms: Tensor | None,
    denominators: Tensor | None,
    deltas: Tensor | None,
    groups: int,
    config: Config,
) -> Tensor:
    """The sums over each group of tokens, (B H, groups, NUM_SUMS)."""
    B, H, N, _ = x.shape
    sums = _empty(B * H, groups, config.NUM_SUMS, device=x.device)
    launch(
        group_sums_kernel, (B * H, groups), view(x), view(y), norms, denominators, deltas, sums,
        H, N, config.group_size(N, groups), config=config,
    )  # fmt: skip
    return sums


def _sums_beside(
    x: Tensor,
    y: Tensor,
    denominators: Tensor | None,
    deltas: Tensor | None,
    groups: int,
    config: Config,
    reverse: bool = False,
) -> Tensor | None:
    """For each group the sums over all groups before it (reverse: after it); None if there is one group."""
    if groups == 1:
        return None
    sums = _group_sums(x, y, None, denominators, deltas, groups, config)
    blocks = (config.NUM_SUMS + _SCAN_BLOCK - 1) // _SCAN_BLOCK
    grid = (sums.shape[0], blocks)
    launch(exclusive_sums_kernel, grid, sums, groups, reverse, _SCAN_BLOCK, config=config)
    return sums


def _write_gain_gradient(result: Gradients, dslopes: Tensor, scale: float) -> None:
    """From what each program, (B, H, groups), found for a = scale gain."""
    if result.dgain is not None:
        result.dgain.copy_(dslopes.sum((0, 2)) * scale)


def _empty(*shape: int, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)


def _full_config(q: Tensor, v: Tensor, options: Options) -> Config:
    """Tiles of 64 tokens, as Hopper's own matrix instruction takes 64 rows, where the registers allow it."""
    if q.dtype != torch.bfloat16:
        return config_of(q, v, options, block=16, num_warps=4, num_stages=1)
    small, eq4 = _is_small(q, v), options.has_denominator
    if small or not eq4:
        return config_of(q, v, options, block=64, num_warps=4 if small and not eq4 else 8, num_stages=2)
    return config_of(q, v, options, block=32, num_warps=8, num_stages=1)


def _tile_config(q: Tensor, v: Tensor, options: Options) -> Config:
    return config_of(q, v, options, block=TILE, num_warps=8, num_stages=1)


def _scan_config(q: Tensor, v: Tensor, options: Options) -> Config:
    """As `_full_config`; the state of a large head leaves the least room."""
    small = _is_small(q, v)
    block = 16 if q.dtype != torch.bfloat16 or not small else 32 if options.has_denominator else 64
    return config_of(q, v, options, block=block, num_warps=4 if small else 8, num_stages=1)


def _is_small(q: Tensor, v: Tensor) -> bool:
    return padded(max(q.shape[-1], v.shape[-1])) <= 64
