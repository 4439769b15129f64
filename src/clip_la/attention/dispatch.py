"""Which backend serves a call: decided once for each device, dtype and head size, and never changed silently.

"auto" is the first of `BACKENDS` that can serve. The environment variable CLIP_LA_BACKEND names another
default; a backend that was named and can't serve is an error.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

import torch

_MODULES = {
    "triton": "clip_la.attention.triton_backend",
    "native": "clip_la.attention.native_backend",
    "torch": "clip_la.attention.torch_backend",
}
BACKENDS = tuple(_MODULES)
"""The fastest first: fused Triton kernels for CUDA, compiled C++ for the CPU, torch operations for all."""


def which(
    device: torch.device | str, dtype: torch.dtype, *, head_size: int = 64, backend: str = "auto"
) -> str:
    """The backend that serves such a call: `backend` itself, or what "auto" comes to.

    Raises:
        ValueError: no such backend, or it can't serve the call, and why.
    """
    if backend == "auto":
        backend = os.environ.get("CLIP_LA_BACKEND") or "auto"
    return _which(torch.device(device), dtype, head_size, backend)


def why_not(
    backend: str, device: torch.device | str, dtype: torch.dtype, *, head_size: int = 64
) -> str | None:
    """Why a backend can't serve such a call; None if it can."""
    reason: str | None = implementation(backend).why_not(torch.device(device), dtype, head_size)
    return reason


def explain_choice(device: torch.device | str, dtype: torch.dtype, *, head_size: int = 64) -> str:
    """The backend that "auto" comes to; where it is the slowest one, also what the others lack."""
    chosen = which(device, dtype, head_size=head_size)
    if chosen != BACKENDS[-1]:
        return chosen
    reasons = [
        f"{name}: {reason}"
        for name in BACKENDS[:-1]
        if (reason := why_not(name, device, dtype, head_size=head_size)) is not None
    ]
    return f"{chosen} ({'; '.join(reasons)})" if reasons else chosen


def implementation(backend: str) -> ModuleType:
    """The module of a backend: `forward`, `backward` and `why_not`."""
    return importlib.import_module(_MODULES[backend])


@functools.cache
def _which(device: torch.device, dtype: torch.dtype, head_size: int, backend: str) -> str:
    if backend == "auto":
        return next(name for name in BACKENDS if why_not(name, device, dtype, head_size=head_size) is None)
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; expected auto or one of {', '.join(BACKENDS)}")
    reason = why_not(backend, device, dtype, head_size=head_size)
    if reason is not None:
        raise ValueError(f"backend {backend!r} can't serve this call: {reason}")
    return backend
