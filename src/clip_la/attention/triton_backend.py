"""Eq. 4 and Eq. 7 in fused Triton kernels, for Hopper GPUs.

- `triton_full`: every query sees every key.
- `triton_causal`: causal tiles; Eq. 7 of up to 128 tokens (text) is one.
- `triton_scan`: causal, with sums carried from chunk to chunk.
- `triton_calls`: which of them a call launches. `triton_table`: what they take of the hardware.

Kernels read q, k and v and write the gradients by stride, so that a packed projection needs no copies, and
normalise rows on the way. Results are the same bits every time: nothing is added atomically, and what kernels
are compiled for depends on dtype, head sizes and options alone, not on lengths.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import torch
from torch import Tensor

from clip_la.attention.contract import Forward, Gradients, Inputs
from clip_la.attention.triton_launch import aligned, aligned_outputs

MAX_HEAD_SIZES = {torch.bfloat16: 128, torch.float16: 64, torch.float32: 64}
"""float16 and float32 rows enter products in two parts, and take as many more registers."""
HOPPER = 9
"""Its major compute capability."""


def why_not(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """Why such a call can't be served; None if it can. Loads nothing."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton isn't installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            f"Triton kernels run on CUDA devices (or, to test, with TRITON_INTERPRET=1), not on {device.type}"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != HOPPER:
        return "the GPU isn't a Hopper (compute capability 9.x), whose shared memory the kernels are made for"
    if dtype not in MAX_HEAD_SIZES:
        return f"{dtype} isn't among bfloat16, float16 and float32"
    if head_size > MAX_HEAD_SIZES[dtype]:
        return (
            f"a head has {head_size} elements; for {dtype} the registers hold up to {MAX_HEAD_SIZES[dtype]}"
        )
    return None


def forward(inputs: Inputs, result: Forward) -> None:
    """Attention of q to k and v into `result`."""
    run, _ = _calls(inputs)
    with aligned_outputs(result.out, result.exact_out) as (out, exact_out):
        run(_readable(inputs), result._replace(out=out, exact_out=exact_out))


def backward(dout: Tensor, inputs: Inputs, saved: Forward, result: Gradients) -> None:
    """Gradients into `result`, from that of the output and from what `forward` computed."""
    _, run = _calls(inputs)
    exact_out = saved.exact_out if saved.exact_out.shape[-1] > 0 else saved.out
    saved = saved._replace(out=aligned(exact_out))
    with aligned_outputs(*result[:3]) as (dq, dk, dv):
        run(aligned(dout), _readable(inputs), saved, Gradients(dq, dk, dv, result.dgain))


def _calls(inputs: Inputs) -> tuple[Callable[..., None], Callable[..., None]]:
    """Forward and backward for such a call. Imported here: elsewhere triton may be absent."""
    from clip_la.attention import triton_calls as calls

    if not inputs.options.causal:
        return calls.forward_full, calls.backward_full
    if calls.fits_tile(inputs):
        return calls.forward_tile, calls.backward_tile
    return calls.forward_scan, calls.backward_scan


def _readable(inputs: Inputs) -> Inputs:
    """The same, as kernels can read it."""
    q, k, v, gain, num_keys, options = inputs
    if num_keys is not None:
        num_keys = num_keys.expand(*q.shape[:3], 1).contiguous()
    gain = None if gain is None else gain.contiguous()
    return Inputs(aligned(q), aligned(k), aligned(v), gain, num_keys, options)
