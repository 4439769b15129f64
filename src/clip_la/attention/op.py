"""linear_attention(): Eq. 4 and Eq. 7 of arXiv 2604.10064 in the layout of `scaled_dot_product_attention`.

The work is done by two custom ops, `clip_la::linear_attention` and its backward, so that torch.compile,
torch.export, autograd and activation checkpointing see one opaque call each way. What a few differentiable
torch operations can say (autocast, key padding, a gain given as a number) is said before it.

Both ops take q, k and v as a list: [q, k, v], or [packed], a packed projection (B, N, 3, H, D). The gradient
of the latter is written as one packed tensor too, where autograd would gather three.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from clip_la.attention.contract import Forward, Gradients, Inputs, Options, accumulator, empty_forward
from clip_la.attention.dispatch import implementation, which

KINDS = ("eq4", "eq7")
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
    centre_values: bool = False,
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
        centre_values: only Eq. 7 that isn't causal. v less its mean over the keys takes the place of v, so
            that the constant part vanishes: o_i = scale gain_h sum_n q^_i.k^_n (v_n - mean v).
        backend: "auto", or one of `BACKENDS`.

    Raises:
        ValueError: an argument that the above doesn't allow, or a backend that can't serve it.
    """
    q, k, v = _autocast(q, k, v)
    _check_inputs(q, k, v, causal)
    num_keys = None
    if key_padding_mask is not None:
        _check_padding(key_padding_mask, k)
        padded = key_padding_mask[:, None, :, None]
        k, v = (x.masked_fill(padded, 0.0) for x in (k, v))
        num_keys = _count_keys(key_padding_mask, q, causal) if kind == "eq4" else None
        if centre_values:  # the op's own mean is over all rows, and is nearly 0 after this
            count = (~padded).sum(2, keepdim=True).clamp(min=1)
            mean = v.sum(2, keepdim=True, dtype=accumulator(v.dtype)) / count
            v = (v - mean).to(v.dtype).masked_fill(padded, 0.0)
    options = (kind, causal, scale, gain, normalise_qk, centre_values, backend)
    return _attend([q, k, v], num_keys, *options)


def packed_linear_attention(
    packed: Tensor,
    *,
    kind: str = "eq7",
    causal: bool = False,
    scale: str | float | None = None,
    gain: float | Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    normalise_qk: bool = True,
    centre_values: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`linear_attention` of a packed projection (B, N, 3, H, D) to itself: (B, H, N, D); see there.

    Its gradient is one packed tensor too, written once.
    """
    if packed.ndim != 5 or packed.shape[2] != 3:
        raise ValueError(f"packed has shape {tuple(packed.shape)}; expected (B, N, 3, H, D)")
    if key_padding_mask is not None:
        return linear_attention(
            *_unpack([packed]),
            kind=kind,
            causal=causal,
            scale=scale,
            gain=gain,
            key_padding_mask=key_padding_mask,
            normalise_qk=normalise_qk,
            centre_values=centre_values,
            backend=backend,
        )
    (packed,) = _autocast(packed)
    _check_inputs(*_unpack([packed]), causal)
    return _attend([packed], None, kind, causal, scale, gain, normalise_qk, centre_values, backend)


def _attend(
    qkv: list[Tensor],
    num_keys: Tensor | None,
    kind: str,
    causal: bool,
    scale: str | float | None,
    gain: float | Tensor | None,
    normalise_qk: bool,
    centre_values: bool,
    backend: str,
) -> Tensor:
    q = _unpack(qkv)[0]
    _check_options(kind, scale, gain, normalise_qk, q)
    if centre_values and (kind != "eq7" or causal):
        raise ValueError(
            f"centre_values was asked of {'causal ' if causal else ''}{kind}; it belongs to Eq. 7 that isn't "
            "causal"
        )
    if isinstance(gain, (int, float)):
        gain = torch.full((q.shape[1],), float(gain), dtype=torch.float32, device=q.device)
    _refuse_forward_mode(*qkv, gain)
    factor = None if scale == "length" else 0.5 if scale is None else float(scale)
    outputs = torch.ops.clip_la.linear_attention(
        qkv, gain, num_keys, kind, causal, factor, normalise_qk, centre_values, backend
    )
    return Forward(*outputs).out


def _unpack(qkv: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (B, H, N, D) of [q, k, v] or of [packed]."""
    q, k, v = qkv[0].permute(2, 0, 3, 1, 4).unbind(0) if len(qkv) == 1 else qkv
    return q, k, v


def _implementation(inputs: Inputs, backend: str) -> ModuleType:
    """Chosen inside the ops, so that a traced graph doesn't depend on the machine that traced it."""
    head_size = max(inputs.q.shape[-1], inputs.v.shape[-1])
    return implementation(which(inputs.q.device, inputs.q.dtype, head_size=head_size, backend=backend))


_OPTIONS = "str kind, bool causal, float? scale, bool normalise, bool centre_values, str backend"


@torch.library.custom_op(
    "clip_la::linear_attention",
    mutates_args=(),
    schema=f"(Tensor[] qkv, Tensor? gain, Tensor? num_keys, {_OPTIONS})"
    f" -> ({', '.join(['Tensor'] * len(Forward._fields))})",
)
def _forward_op(qkv: Sequence[Tensor], gain: Tensor | None, num_keys: Tensor | None, *args: Any) -> Forward:
    """The fields of `Forward`. *args: those of `Options` and the name of the backend."""
    inputs = Inputs(*_unpack(qkv), gain, num_keys, Options(*args[:-1]))
    result = empty_forward(inputs)
    with _no_autocast(inputs.q):
        _implementation(inputs, args[-1]).forward(inputs, result)
    return result


@_forward_op.register_fake
def _(qkv: Sequence[Tensor], gain: Tensor | None, num_keys: Tensor | None, *args: Any) -> Forward:
    return empty_forward(Inputs(*_unpack(qkv), gain, num_keys, Options(*args[:-1])))


@torch.library.custom_op(
    "clip_la::linear_attention_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor[] qkv, Tensor? gain, Tensor[] saved, {_OPTIONS}) -> Tensor[]",
)
def _backward_op(
    dout: Tensor, qkv: Sequence[Tensor], gain: Tensor | None, saved: Sequence[Tensor], *args: Any
) -> list[Tensor]:
    """The gradients of qkv, laid out as these, and that of the gain, if there is one."""
    gradients = [torch.empty_like(x) for x in qkv]
    dgain = None if gain is None else torch.empty_like(gain)
    inputs = Inputs(*_unpack(qkv), gain, None, Options(*args[:-1]))
    result = Gradients(*_unpack(gradients), dgain)
    with _no_autocast(inputs.q):
        _implementation(inputs, args[-1]).backward(dout, inputs, Forward(*saved), result)
    return gradients if dgain is None else [*gradients, dgain]


@_backward_op.register_fake
def _(dout: Tensor, qkv: Sequence[Tensor], gain: Tensor | None, *_: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in (qkv if gain is None else [*qkv, gain])]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, gain, _, *options = inputs
    ctx.save_for_backward(*output, gain, *qkv)
    ctx.options = options
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, *_: None) -> tuple[Any, ...]:
    num_saved = len(Forward._fields)
    tensors = ctx.saved_tensors  # once: activation checkpointing unpacks them but once
    saved, (gain, *qkv) = tensors[:num_saved], tensors[num_saved:]
    no_gradients = (None,) * (1 + len(ctx.options))
    if dout is None:
        return [None] * len(qkv), None, *no_gradients
    gradients = torch.ops.clip_la.linear_attention_backward(dout, qkv, gain, saved, *ctx.options)
    return gradients[: len(qkv)], None if gain is None else gradients[-1], *no_gradients


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
    if scale is not None and scale != "length" and not isinstance(scale, (int, float)):
        raise ValueError(f'scale is {scale!r}; expected None, "length" or a number')
    if gain is not None and not isinstance(gain, (int, float, Tensor)):
        raise ValueError(f"gain is {gain!r}; expected None, a number or a Tensor ({q.shape[1]},)")
    if isinstance(gain, Tensor) and (gain.shape != q.shape[1:2] or gain.device != q.device):
        raise ValueError(
            f"gain has shape {tuple(gain.shape)} on {gain.device}; expected one number a head, "
            f"({q.shape[1]},), on {q.device}"
        )


def _refuse_forward_mode(*tensors: Tensor | None) -> None:
    """The ops have no forward-mode derivative, and torch would take that for a derivative of 0.

    Raises:
        NotImplementedError: an input with a tangent, as torch.func.jvp makes them.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    unpack_dual: Any = forward_ad.unpack_dual  # torch leaves it untyped
    if any(x is not None and unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "linear attention has no forward-mode derivative (jvp, jacfwd, hessian); use reverse mode, "
            "torch.autograd.grad, once"
        )


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
