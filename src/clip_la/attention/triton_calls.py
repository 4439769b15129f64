"""Which kernels a call launches, on how many programs, and in tiles of which size."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clip_la.attention.contract import Forward, Gradients, Inputs
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


def fits_tile(inputs: Inputs) -> bool:
    """Whether a causal call is one tile; others have too many tokens, or would overfill the registers."""
    in_registers = _is_small(inputs) and inputs.q.dtype == torch.bfloat16
    return inputs.q.shape[2] <= TILE and in_registers and not inputs.options.has_denominator


def forward_full(inputs: Inputs, result: Forward) -> None:
    """Fill `result`, not causal."""
    q, k, v, gain, num_keys, _ = inputs
    (B, H, N, _), M, config = q.shape, k.shape[2], _full_config(inputs)
    exact_out = result.exact_out if config.KEEP_EXACT else result.out
    k_norms = optional(result.k_norm)
    queries = (
        view(q), num_keys, view(result.out), view(exact_out), optional(result.q_norm),
        optional(result.denominator),
    )  # fmt: skip
    factors = (gain, inputs.scale)
    groups = num_groups(B * H, min(N, M), q.device)
    if groups == 1:
        launch(
            full_forward_kernel, (B * H,), *queries, view(k), view(v), k_norms, result.state, result.key_sum,
            result.value_mean, *factors, H, N, M, config=config,
        )  # fmt: skip
        return
    sums = _group_sums(k, v, k_norms, None, None, result.value_mean, groups, config).sum(1)
    S, z, kappa = sums.tensor_split((config.D * config.E, (config.D + 1) * config.E), dim=-1)
    if config.CENTRE:
        _centre_sums(S, z, kappa, result.value_mean, inputs.mean_count)
    result.state.copy_(S.view_as(result.state))
    if config.SUM_KEYS:
        result.key_sum.copy_(kappa.view_as(result.key_sum))
    size = config.group_size(N, groups)
    launch(queries_kernel, (B * H, groups), *queries, sums, *factors, H, N, M, size, config=config)


def backward_full(dout: Tensor, inputs: Inputs, saved: Forward, result: Gradients) -> None:
    """Fill `result`, not causal."""
    q, k, v, gain, _, _ = inputs
    (B, H, N, _), M, config = q.shape, k.shape[2], _full_config(inputs)
    groups = num_groups(B * H, min(N, M), q.device)
    dslopes = _empty(B, H, groups, device=q.device)
    dsums = _empty(B * H, groups, config.NUM_SUMS, device=q.device)
    queries = (
        view(dout), view(q), saved.state, saved.key_sum, optional(saved.q_norm), optional(saved.denominator),
        _denominator_gradients(dout, saved, config), dsums, dslopes, view(result.dq),
    )  # fmt: skip
    keys = (view(k), view(v), optional(saved.k_norm), saved.value_mean, view(result.dk), view(result.dv))
    factors = (gain, inputs.scale)
    if groups == 1:
        launch(full_backward_kernel, (B * H,), *queries, *keys, *factors, H, N, M, config=config)
    else:
        grid, sizes = (B * H, groups), (config.group_size(N, groups), config.group_size(M, groups))
        launch(query_gradients_kernel, grid, *queries, *factors, H, N, sizes[0], config=config)
        launch(
            key_gradients_kernel, grid, *keys, saved.key_sum, dsums.sum(1), *factors, H, M, sizes[1],
            config=config,
        )  # fmt: skip
    _write_gain_gradient(result, dslopes, inputs.scale)


def forward_tile(inputs: Inputs, result: Forward) -> None:
    """Fill `result`, causal, where `fits_tile`."""
    q, k, v, gain, _, _ = inputs
    B, H, N, _ = q.shape
    launch(
        tile_forward_kernel, (B * H,), view(q), view(k), view(v), result.q_norm, result.k_norm,
        view(result.out), gain, inputs.scale, H, N, config=_tile_config(inputs),
    )  # fmt: skip


def backward_tile(dout: Tensor, inputs: Inputs, saved: Forward, result: Gradients) -> None:
    """Fill `result`, causal, where `fits_tile`."""
    q, k, v, gain, _, _ = inputs
    B, H, N, _ = q.shape
    dslopes = _empty(B, H, 1, device=q.device)
    launch(
        tile_backward_kernel, (B * H,), view(dout), view(q), view(k), view(v), saved.q_norm, saved.k_norm,
        dslopes, view(result.dq), view(result.dk), view(result.dv), gain, inputs.scale, H, N,
        config=_tile_config(inputs),
    )  # fmt: skip
    _write_gain_gradient(result, dslopes, inputs.scale)


def forward_scan(inputs: Inputs, result: Forward) -> None:
    """Fill `result`, causal."""
    q, k, v, gain, num_keys, _ = inputs
    (B, H, N, _), config = q.shape, _scan_config(inputs)
    groups = num_groups(B * H, N, q.device)
    exact_out = result.exact_out if config.KEEP_EXACT else result.out
    launch(
        scan_forward_kernel, (B * H, groups), view(q), view(k), view(v), num_keys, view(result.out),
        view(exact_out), optional(result.q_norm), optional(result.k_norm), optional(result.denominator),
        _sums_beside(k, v, None, None, groups, config), gain, inputs.scale, H, N,
        config.group_size(N, groups), config=config,
    )  # fmt: skip


def backward_scan(dout: Tensor, inputs: Inputs, saved: Forward, result: Gradients) -> None:
    """Fill `result`, causal."""
    q, k, v, gain, _, _ = inputs
    (B, H, N, _), config = q.shape, _scan_config(inputs)
    groups = num_groups(B * H, N, q.device)
    dslopes = _empty(B, H, groups, device=q.device)
    denominators, deltas = optional(saved.denominator), _denominator_gradients(dout, saved, config)
    tensors = (view(dout), view(q), view(k), view(v), denominators, deltas)
    sizes = (gain, inputs.scale, H, N, config.group_size(N, groups))
    grid = (B * H, groups)
    earlier = _sums_beside(k, v, None, None, groups, config)
    launch(
        scan_query_gradients_kernel, grid, *tensors, earlier, dslopes, view(result.dq), *sizes, config=config
    )
    later = _sums_beside(q, dout, denominators, deltas, groups, config, reverse=True)
    launch(scan_key_gradients_kernel, grid, *tensors, later, view(result.dk), *sizes, config=config)
    launch(
        scan_value_gradients_kernel, grid, *tensors[:3], denominators, later, view(result.dv), *sizes,
        config=config,
    )  # fmt: skip
    _write_gain_gradient(result, dslopes, inputs.scale)


def _denominator_gradients(dout: Tensor, saved: Forward, config: Config) -> Tensor | None:
    """Of Eq. 4's denominators, (B, H, N); Eq. 7 has none. saved.out is the output before rounding."""
    if not config.EQ4:
        return None
    B, H, N, _ = dout.shape
    deltas = _empty(B, H, N, device=dout.device)
    launch(
        denominator_gradients_kernel, (B * H, math.ceil(N / config.BLOCK)), view(dout), view(saved.out),
        saved.denominator, deltas, H, N, config=config,
    )  # fmt: skip
    return deltas


def _group_sums(
    x: Tensor,
    y: Tensor,
    norms: Tensor | None,
    denominators: Tensor | None,
    deltas: Tensor | None,
    shifts: Tensor | None,
    groups: int,
    config: Config,
) -> Tensor:
    """The sums over each group of tokens, (B H, groups, NUM_SUMS). Of values to be centred less `shifts`."""
    B, H, N, _ = x.shape
    sums = _empty(B * H, groups, config.NUM_SUMS, device=x.device)
    launch(
        group_sums_kernel, (B * H, groups), view(x), view(y), norms, denominators, deltas, shifts, sums,
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
    sums = _group_sums(x, y, None, denominators, deltas, None, groups, config)
    blocks = (config.NUM_SUMS + _SCAN_BLOCK - 1) // _SCAN_BLOCK
    grid = (sums.shape[0], blocks)
    launch(exclusive_sums_kernel, grid, sums, groups, reverse, _SCAN_BLOCK, config=config)
    return sums


def _centre_sums(S: Tensor, z: Tensor, kappa: Tensor, value_mean: Tensor, mean_count: int) -> None:
    """From sums (B H, ...) over v less a row, in `value_mean`, to those over v less its mean; z becomes 0."""
    z /= mean_count
    S -= (kappa[:, :, None] * z[:, None, :]).flatten(1)
    value_mean += z.view_as(value_mean)
    z.zero_()


def _write_gain_gradient(result: Gradients, dslopes: Tensor, scale: float) -> None:
    """From what each program, (B, H, groups), found for a = scale gain."""
    if result.dgain is not None:
        result.dgain.copy_(dslopes.sum((0, 2)) * scale)


def _empty(*shape: int, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)


def _full_config(inputs: Inputs) -> Config:
    """Tiles of 64 tokens, as Hopper's own matrix instruction takes 64 rows, where the registers allow it."""
    if inputs.q.dtype != torch.bfloat16:
        return config_of(inputs, block=16, num_warps=4, num_stages=1)
    small, options = _is_small(inputs), inputs.options
    if small or not options.keeps_key_sum:
        num_warps, num_stages = (4 if small and not options.has_denominator else 8), (2 if small else 1)
        return config_of(inputs, block=64, num_warps=num_warps, num_stages=num_stages)
    return config_of(inputs, block=32, num_warps=8, num_stages=1)


def _tile_config(inputs: Inputs) -> Config:
    return config_of(inputs, block=TILE, num_warps=8, num_stages=1)


def _scan_config(inputs: Inputs) -> Config:
    """As `_full_config`; the state of a large head leaves the least room."""
    small = _is_small(inputs)
    block = (
        16 if inputs.q.dtype != torch.bfloat16 or not small else 32 if inputs.options.has_denominator else 64
    )
    return config_of(inputs, block=block, num_warps=4 if small else 8, num_stages=1)


def _is_small(inputs: Inputs) -> bool:
    return padded(max(inputs.q.shape[-1], inputs.v.shape[-1])) <= 64
