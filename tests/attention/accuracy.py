"""Inputs and comparisons shared by the attention tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
"""Largest relative RMS error against float64."""


def random_qkv(B: int, H: int, N: int, D: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k and v of unit variance, rounded to dtype."""
    return [torch.randn(B, H, N, D, dtype=torch.float64).to(dtype) for _ in range(3)]


def output_and_gradients(attention: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """[out, gradient of each input], for an output gradient that depends on the shape alone."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attention(*leaves)
    generator = torch.Generator().manual_seed(7)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).bfloat16().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_close(
    found: Sequence[Tensor], truth: Sequence[Tensor], dtype: torch.dtype, least_size: float = 1e-12
) -> None:
    """Every tensor is finite and within dtype's relative RMS error of the float64 truth.

    Tensors whose RMS is below least_size are compared absolutely, as if they had that size.
    """
    for index, (x, expected) in enumerate(zip(found, truth, strict=True)):
        assert x.isfinite().all(), f"tensor {index} is not finite"
        error = (x.double() - expected).square().mean().sqrt()
        size = expected.square().mean().sqrt().clamp_min(least_size)
        assert error <= TOLERANCE[dtype] * size, f"tensor {index}: relative error {error / size:.1e}"
