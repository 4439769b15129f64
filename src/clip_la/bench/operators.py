"""What is timed beside each other: softmax, Eq. 4 and Eq. 7, other libraries' kernels, and two ceilings.

Each operator takes a packed projection (B, N, 3, H, D), as a model has it, to (B, H, N, D). The ceilings
are the bare matrix products that linear attention can't do without, and reading and writing each tensor once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from clip_la.attention import packed_linear_attention
from clip_la.attention.reference import eq4_attention, eq7_attention, softmax_attention
from clip_la.bench.timing import Call

Attention = Callable[[Tensor], Tensor]
CEILINGS = ("matmul", "copy")


@dataclass(frozen=True)
class Shape:
    """The sizes of one comparison: batch, heads, tokens and head size; causal or not; the dtype."""

    B: int
    H: int
    N: int
    D: int
    causal: bool
    dtype: torch.dtype

    def packed(self, device: torch.device) -> Tensor:
        """A random projection (B, N, 3, H, D)."""
        return torch.randn(self.B, self.N, 3, self.H, self.D, device=device, dtype=self.dtype)

    def gradient(self, device: torch.device) -> Tensor:
        """A random gradient of the output (B, H, N, D), laid out by tokens."""
        shape = self.B, self.N, self.H, self.D
        return torch.randn(shape, device=device, dtype=self.dtype).transpose(1, 2)


@dataclass(frozen=True)
class Operator:
    """An attention to time, and the float64 function that it should be."""

    name: str
    label: str
    attention: Callable[[Tensor, bool], Tensor]
    reference: Callable[..., Tensor]
    modes: tuple[bool, ...] = (False, True)  # causal or not


def available_operators(device: torch.device, causal: bool) -> list[Operator]:
    """Those of this package, and other libraries' where they are installed and there is a GPU."""
    operators = [
        Operator("softmax", "softmax (SDPA)", _softmax, softmax_attention),
        Operator("eq4", "Eq. 4", _linear("eq4"), eq4_attention),
        Operator("eq7", "Eq. 7", _linear("eq7"), eq7_attention),
    ]
    if device.type == "cuda" and importlib.util.find_spec("fla"):
        operators.append(Operator("fla", "flash-linear-attention", _fla, _plain_linear, (True,)))
    if device.type == "cuda" and importlib.util.find_spec("fbi_la"):
        label = "flash-bidirectional-linear-attention"
        operators.append(Operator("fbi_la", label, _fbi_la, _plain_linear, (False,)))
    return [operator for operator in operators if causal in operator.modes]


def error_of(operator: Operator, shape: Shape, device: torch.device) -> float:
    """Largest relative RMS error of the output and of the input's gradient against float64."""
    packed = shape.packed(device)
    dout = shape.gradient(device)
    found = _value_and_gradient(lambda x: operator.attention(x, shape.causal), packed, dout)
    truth = _value_and_gradient(
        lambda x: operator.reference(*_qkv(x), causal=shape.causal), packed.double(), dout.double()
    )
    return max(_relative_rms(x, y) for x, y in zip(found, truth, strict=True))


def forward_call(operator: Operator, shape: Shape, packed: Tensor) -> Call:
    """The forward pass alone, without a graph."""

    def call() -> None:
        """One forward pass."""
        with torch.inference_mode():
            operator.attention(packed, shape.causal)

    return call


def training_call(operator: Operator, shape: Shape, packed: Tensor) -> Call:
    """Forward and backward."""
    leaf = packed.detach().requires_grad_()
    dout = shape.gradient(packed.device)

    def call() -> None:
        """One forward and one backward pass."""
        torch.autograd.grad(operator.attention(leaf, shape.causal), leaf, dout)

    return call


def ceiling_calls(shape: Shape, packed: Tensor, training: bool) -> dict[str, Call]:
    """The bare products of linear attention, and a copy of as many bytes as it reads and writes."""
    q, k, v = (x.contiguous() for x in _qkv(packed))

    def matmul() -> None:
        """k^T v, q S, and in training the products that their gradients take."""
        S = k.mT @ v
        q @ S
        if training:
            dS = q.mT @ v
            v @ S.mT
            v @ dS.mT
            k @ dS

    # Forward reads q, k, v and writes out; backward reads q, k, v, dout and writes dq, dk, dv.
    num_copies = 2.0 + (3.5 if training else 0.0)
    source = q.new_empty(int(num_copies * q.numel()))
    target = torch.empty_like(source)
    return {"matmul": matmul, "copy": lambda: target.copy_(source)}


def _qkv(packed: Tensor) -> tuple[Tensor, ...]:
    return packed.permute(2, 0, 3, 1, 4).unbind(0)


def _softmax(packed: Tensor, causal: bool) -> Tensor:
    q, k, v = _qkv(packed)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _linear(kind: str) -> Callable[[Tensor, bool], Tensor]:
    return lambda packed, causal: packed_linear_attention(packed, kind=kind, causal=causal)


def _fla(packed: Tensor, causal: bool) -> Tensor:
    """Its linear attention without normalisation, the nearest it has; always causal."""
    from fla.ops.linear_attn import chunk_linear_attn

    q, k, v = packed.unbind(2)
    out: Tensor = chunk_linear_attn(q, k, v, scale=1.0, normalize=False)[0]
    return out.transpose(1, 2)


def _fbi_la(packed: Tensor, causal: bool) -> Tensor:
    """Its plain linear attention, not causal."""
    from fbi_la.ops.linear_attn import linear_attention

    out: Tensor = linear_attention(*(x.contiguous() for x in _qkv(packed)), scale=1.0)
    return out


def _plain_linear(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    weights = q @ k.mT
    return (weights.tril() if causal else weights) @ v


def _value_and_gradient(attention: Attention, packed: Tensor, dout: Tensor) -> list[Tensor]:
    leaf = packed.detach().requires_grad_()
    out = attention(leaf)
    (gradient,) = torch.autograd.grad(out, leaf, dout)
    return [out.detach(), gradient]


def _relative_rms(x: Tensor, truth: Tensor) -> float:
    error = (x.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()
    return float(error)
