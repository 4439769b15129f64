"""linear_attention(): Eq. 4 and Eq. 7 of arXiv 2604.10064 in the layout of `scaled_dot_product_attention`.

The work is done by two custom ops, `clip_la::linear_attention` and its backward, so that torch.compile,
torch.export, autograd and activation checkpointing see one opaque call each way. What can be said in a few
differentiable torch operations (autocast, key padding, a gain given as a number) is said before it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from clip_la.attention import torch_backend
from clip_la.attention.contract import Forward, Gradients, Options, empty_forward, empty_gradients

KINDS = ("eq4", "eq7")
BACKENDS = ("torch",)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kind: str = "eq7",
    causal: bool = False,
    scale: str | float | None = None,
    gain: float | Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    normalise_qk: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Linear attention of q (B, H, N, D) to k (B, H, M, D) and v (B, H, M, E): (B, H, N, E).

    Eq. 7: o_i = scale sum_n (1 + gain_h q^_i.k^_n) v_n, with hats for x / max(|x|, 1e-12).
    Eq. 4: o_i = sum_n (1 + q^_i.k^_n) v_n / sum_n (1 + q^_i.k^_n), the denominator kept `EQ4_FLOOR` from 0.
    Differentiable once in q, k, v and gain. Any strides; the result is laid out as (B, N, H, E).

    Args:
        q, k, v: float32, bfloat16, float16 or float64, all of one dtype; under autocast, all but float64 are
            first cast to its dtype, as for `scaled_dot_product_attention`.
        kind: "eq7" or "eq4".
        causal: n runs over n <= i; needs M = N.
        scale: Eq. 7 only. None for the paper's 1/2, "length" for 1/M (padded tokens count), or a number.
        gain: Eq. 7 only. None for the paper's 1, a number, or a Tensor (H,).
        key_padding_mask: bool (B, M), True where a key is to be ignored.
        normalise_qk: Eq. 4 only. False takes q and k as they are.
        backend: "auto", or one of `BACKENDS`.

    Raises:
        ValueError: an argument that the above doesn't allow, or a backend that can't serve it.
    """
    q, k, v = _autocast(q, k, v)
    _check_inputs(q, k, v, causal)
    _check_options(kind, scale, gain, normalise_qk, q)
    backend = which(q.device, q.dtype, kind=kind, causal=causal, backend=backend)
    num_keys = None
    if key_padding_mask is not None:
        _check_padding(key_padding_mask, k)
        k, v = (x.masked_fill(key_padding_mask[:, None, :, None], 0.0) for x in (k, v))
        num_keys = _count_keys(key_padding_mask, q, causal) if kind == "eq4" else None
    if isinstance(gain, (int, float)):
        gain = torch.full((q.shape[1],), float(gain), dtype=torch.float32, device=q.device)
    factor = None if scale == "length" else 0.5 if scale is None else float(scale)
    out: Tensor = torch.ops.clip_la.linear_attention(
        q, k, v, gain, num_keys, kind, causal, factor, normalise_qk, backend
    )[0]
    return out


def which(
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    kind: str = "eq7",
    causal: bool = False,
    backend: str = "auto",
) -> str:
    """The backend that serves such a call: what "auto" comes to, or `backend` itself if it can.

    Raises:
        ValueError: no such backend, or it can't serve the call.
    """
    if backend == "auto":
        return "torch"
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; expected auto or one of {', '.join(BACKENDS)}")
    return backend


@torch.library.custom_op("clip_la::linear_attention", mutates_args=())
def _forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    num_keys: Tensor | None,
    kind: str,
    causal: bool,
    scale: float | None,
    normalise: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Forward`. scale None: 1/M, so that no length becomes a constant."""
    with _no_autocast(q):
        return torch_backend.forward(q, k, v, gain, num_keys, Options(kind, causal, scale, normalise))


@_forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    num_keys: Tensor | None,
    kind: str,
    causal: bool,
    scale: float | None,
    normalise: bool,
    backend: str,
) -> Forward:
    return empty_forward(q, k, v, Options(kind, causal, scale, normalise))


@torch.library.custom_op("clip_la::linear_attention_backward", mutates_args=())
def _backward_op(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None,
    out: Tensor,
    state: Tensor,
    key_sum: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    denominator: Tensor,
    kind: str,
    causal: bool,
    scale: float | None,
    normalise: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Gradients`."""
    saved = Forward(out, state, key_sum, q_norm, k_norm, denominator)
    with _no_autocast(q):
        return torch_backend.backward(dout, q, k, v, gain, saved, Options(kind, causal, scale, normalise))


@_backward_op.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, gain: Tensor | None, *_: Any) -> Gradients:
    return empty_gradients(q, k, v, gain)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, gain, _, *options = inputs
    ctx.save_for_backward(q, k, v, gain, *output)
    ctx.options = options
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 10
    q, k, v, gain, *outputs = ctx.saved_tensors
    dq, dk, dv, dgain = torch.ops.clip_la.linear_attention_backward(
        dout, q, k, v, gain, *outputs, *ctx.options
    )
    return dq, dk, dv, None if gain is None else dgain, *(None,) * 6


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast treats scaled_dot_product_attention: all to its dtype, float64 excepted."""
    device_type = tensors[0].device.type
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _no_autocast(q: Tensor) -> contextlib.AbstractContextManager[Any]:
    """The backends choose the dtype of each product themselves."""
    device_type = q.device.type
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"{shapes}; expected four dimensions each: (batch, heads, tokens, head size)")
    if not q.shape[:2] == k.shape[:2] == v.shape[:2] or k.shape[2] != v.shape[2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{shapes}; expected q (B, H, N, D), k (B, H, M, D) and v (B, H, M, E)")
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"{shapes}; causal attention needs as many queries as keys")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(
            f"dtypes q {q.dtype}, k {k.dtype}, v {v.dtype}; expected one of {names} for all three"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"devices q {q.device}, k {k.device}, v {v.device}; expected one for all three")


def _check_options(
    kind: str, scale: str | float | None, gain: float | Tensor | None, normalise_qk: bool, q: Tensor
) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; linear attention has {' and '.join(KINDS)}")
    if kind == "eq4" and (scale is not None or gain is not None):
        raise ValueError("Eq. 4 divides by the sum of its weights and takes no scale and no gain; Eq. 7 does")
    if kind == "eq7" and not normalise_qk:
        raise ValueError("Eq. 7 always normalises q and k; normalise_qk=False belongs to Eq. 4")
    if isinstance(scale, str) and scale != "length":
        raise ValueError(f'scale is {scale!r}; expected None, "length" or a number')
    if isinstance(gain, Tensor) and gain.shape != q.shape[1:2]:
        raise ValueError(f"gain has shape {tuple(gain.shape)}; expected one number a head, ({q.shape[1]},)")


def _check_padding(key_padding_mask: Tensor, k: Tensor) -> None:
    expected = (k.shape[0], k.shape[2])
    if key_padding_mask.dtype != torch.bool or key_padding_mask.shape != expected:
        raise ValueError(
            f"key_padding_mask is {key_padding_mask.dtype} {tuple(key_padding_mask.shape)}; expected bool "
            f"{expected}, True where a key is to be ignored"
        )


def _count_keys(key_padding_mask: Tensor, q: Tensor, causal: bool) -> Tensor:
    """How many keys that are not padding each query sees: (B, 1, N, 1), float32 or float64."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    valid = (~key_padding_mask).to(dtype)
    counts = valid.cumsum(1) if causal else valid.sum(1, keepdim=True).expand(-1, q.shape[2])
    return counts[:, None, :, None]
