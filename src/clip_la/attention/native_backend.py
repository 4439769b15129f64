"""Closed-form forward and backward of Eq. 4 and Eq. 7 in C++, for float32 and bfloat16 on the CPU.

The C++ in `native/` works on blocks of tokens in the cores' caches, in float32, and reads and writes q, k, v,
the output and the gradients once, where they lie. This file hands it the addresses.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from clip_la.attention.contract import Forward, Gradients, Inputs
from clip_la.attention.native_library import load_library, why_unavailable
from clip_la.attention.reference import EQ4_FLOOR, NORM_FLOOR

DTYPES = (torch.float32, torch.bfloat16)
MAX_HEAD_SIZE = 256

_MIN_SEGMENT = 1024
_MIN_CAUSAL_SEGMENT = 8192
"""Longer, since the sums before and after each causal segment take another pass over keys and queries."""
_TASKS = 64
"""Enough for the cores of most machines. It doesn't depend on their number: a sum's order would."""
_LANES = 16
"""Rows of the sums are padded to this many elements, or fewer."""
_HUGE_PAGES_FROM = 4 * 2**20  # bytes
_LIBC = ctypes.CDLL(None) if hasattr(mmap, "MADV_HUGEPAGE") else None
_POINTERS = ("gain", "state", "key_sum", "value_mean", "dgain", "sums", "later_sums")
"""What is handed over without strides."""


def why_not(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """Why this backend can't serve such a call; None if it can."""
    if device.type != "cpu":
        return f"it runs on the CPU, and the tensors are on {device}"
    if dtype not in DTYPES:
        return f"it takes float32 and bfloat16, and the tensors are {dtype}"
    if head_size > MAX_HEAD_SIZE:
        return f"it takes heads of up to {MAX_HEAD_SIZE} elements, and these have {head_size}"
    return why_unavailable()


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("token", ctypes.c_int64),
    )


class _Problem(ctypes.Structure):
    """`Problem` in native/problem.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("B", "H", "N", "M", "D", "E")),
        *((name, ctypes.c_int32) for name in ("causal", "normalise", "has_denominator", "centre_values")),
        *((name, ctypes.c_int64) for name in ("num_threads", "num_segments")),
        *((name, ctypes.c_float) for name in ("scale", "norm_floor", "denominator_floor")),
        ("gain", ctypes.c_void_p),
        *((name, _Tensor) for name in ("q", "k", "v", "num_keys")),
        *((name, _Tensor) for name in ("out", "exact_out", "q_norm", "k_norm", "denominator")),
        *((name, ctypes.c_void_p) for name in ("state", "key_sum", "value_mean")),
        *((name, _Tensor) for name in ("dout", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("dgain", "sums", "later_sums")),
    )


def forward(inputs: Inputs, result: Forward) -> None:
    """Attention of q to k and v into `result`."""
    tensors = {"out": result.out, **_kept(result)}
    if inputs.options.has_denominator:
        tensors["num_keys"] = inputs.visible_keys().expand(-1, inputs.q.shape[1], -1, -1)
    _prefer_huge_pages(result.out)
    _run("forward", inputs, tensors, None)


def backward(dout: Tensor, inputs: Inputs, saved: Forward, result: Gradients) -> None:
    """Gradients into `result`, from that of the output and from what `forward` computed."""
    gradients = {"dq": result.dq, "dk": result.dk, "dv": result.dv}
    rows = {name: _rows(x) for name, x in gradients.items()}
    tensors = {"dout": _rows(dout), "exact_out": _rows(saved.out)}
    for gradient in gradients.values():
        _prefer_huge_pages(gradient)
    _run("backward", inputs, tensors | _kept(saved) | rows, result.dgain)
    for name, gradient in gradients.items():
        if rows[name] is not gradient:
            gradient.copy_(rows[name])


def _run(direction: str, inputs: Inputs, tensors: dict[str, Tensor], dgain: Tensor | None) -> None:
    """Call the C++ function of that name and dtype with the tensors' addresses; sum dgain over the batch."""
    q, k, v, gain, _, options = inputs
    tensors = {"q": _rows(q), "k": _rows(k), "v": _rows(v), **tensors}
    B, H, N, D = q.shape
    M, E = v.shape[-2:]
    shortest = _MIN_CAUSAL_SEGMENT if options.causal else _MIN_SEGMENT
    num_segments = min(-(-_TASKS // max(B * H, 1)), max(1, max(N, M) // shortest))
    problem = _Problem(B, H, N, M, D, E, options.causal, options.normalise, options.has_denominator)
    problem.centre_values = options.centre_values
    problem.num_threads, problem.num_segments = torch.get_num_threads(), num_segments
    problem.scale, problem.norm_floor, problem.denominator_floor = inputs.scale, NORM_FLOOR, EQ4_FLOOR
    pointers: dict[str, Tensor] = {}
    if num_segments > 1:
        pointers |= {name: _new_sums(q, v, num_segments) for name in ("sums", "later_sums")}
    if gain is not None:
        pointers["gain"] = gain.float().contiguous()
    if dgain is not None:
        pointers["dgain"] = torch.zeros(B, H, num_segments)
    for name, x in (tensors | pointers).items():
        setattr(problem, name, x.data_ptr() if name in _POINTERS else _Tensor(x.data_ptr(), *x.stride()[:3]))
    function = getattr(load_library(), f"clip_la_{direction}_{str(q.dtype).removeprefix('torch.')}")
    function(ctypes.byref(problem))
    if dgain is not None:
        dgain.copy_(pointers["dgain"].sum((0, 2)))


def _new_sums(q: Tensor, v: Tensor, num_segments: int) -> Tensor:
    """Room for S, z and kappa of every segment, and for the padding of their rows."""
    D, E = (-(-x.shape[-1] // _LANES) * _LANES for x in (q, v))
    return torch.empty(*q.shape[:2], num_segments, D * E + E + D)


def _prefer_huge_pages(x: Tensor) -> None:
    """Ask for large pages where x is large and not yet written: small ones cost more than the arithmetic."""
    storage = x.untyped_storage()
    if _LIBC is not None and storage.nbytes() >= _HUGE_PAGES_FROM:
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (storage.data_ptr() + storage.nbytes() - start) // mmap.PAGESIZE * mmap.PAGESIZE
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


def _rows(x: Tensor) -> Tensor:
    """x with the elements of each row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _kept(result: Forward) -> dict[str, Tensor]:
    """What the options at hand keep of a forward, but for the output."""
    names = ("exact_out", "q_norm", "k_norm", "denominator", "state", "key_sum", "value_mean")
    return {name: getattr(result, name) for name in names if getattr(result, name).numel() > 0}
