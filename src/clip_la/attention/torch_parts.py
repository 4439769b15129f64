"""Pieces of the torch backend: unit rows, Eq. 4's denominator, and cutting the work in pieces for the caches.

Tensors are (B, H, N, D), one number a row (B, H, N, 1), S (B, H, D, E), one number a head (1, H, 1, 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from clip_la.attention.contract import CHUNK, Options, accumulator
from clip_la.attention.reference import EQ4_FLOOR, NORM_FLOOR

_PIECE_ELEMENTS = 3 * 2**19
"""Elements of one operand in a piece of work on the CPU: few enough that a result is still in a cache when it
is read again, enough that the fixed costs of a torch call don't count."""

_MIN_BFLOAT16_TOKENS = 64
"""Shorter sums of bfloat16 rows are taken in float32: too few terms for their roundings to average out."""


def unit_rows(x: Tensor, norm: Tensor, options: Options) -> Tensor:
    """x / max(|x|, NORM_FLOOR), contiguous, and |x| into `norm`; raw rows are left as they are."""
    if not options.normalise:
        return x
    if _has_fused_norm(x):
        unit, fused_norm = torch._weight_norm_interface(_rows(x), _one_per_row(x))
        norm.copy_(fused_norm.view(norm.shape))
        if fused_norm.amin() > NORM_FLOOR:
            return unit.view(x.shape)
    else:
        norm.copy_(torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=norm.dtype))
    return (x / norm.clamp_min(NORM_FLOOR)).to(x.dtype)


def write_through_norm(dx: Tensor, dunit: Tensor, x: Tensor, norm: Tensor, options: Options) -> None:
    """The gradient of x into `dx`, from that of `unit_rows(x)`.

    dx = (dunit - x^ (x^.dunit)) / |x|; in a row below NORM_FLOOR dunit / NORM_FLOOR, cut at float16's range.
    """
    if not options.normalise:
        dx.copy_(dunit)
        return
    if _has_fused_norm(x) and norm.amin() > NORM_FLOOR:
        fused_dx, _ = torch.ops.aten._weight_norm_interface_backward(
            _rows(dunit), _rows(x), _one_per_row(x), _rows(norm), 0
        )
        dx.copy_(fused_dx.view(dx.shape))
        return
    floored = norm.clamp_min(NORM_FLOOR)
    unit = x / floored
    along = (dunit * unit).sum(-1, keepdim=True)
    short = norm < NORM_FLOOR
    grad = (dunit - unit * along.masked_fill(short, 0.0)) / floored
    if dx.dtype == torch.float16:
        limit = torch.finfo(dx.dtype).max
        grad = torch.where(short, grad.clamp(-limit, limit), grad)
    dx.copy_(grad)


def _has_fused_norm(x: Tensor) -> bool:
    """Whether torch's weight norm, the fused form of this forward and backward, runs on x without a sync."""
    return x.device.type == "cpu" and x.numel() > 0


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])


def _one_per_row(x: Tensor) -> Tensor:
    return x.new_ones(x.numel() // x.shape[-1], 1)


def floored(denominator: Tensor) -> Tensor:
    """Kept EQ4_FLOOR away from 0, with its sign."""
    floor = torch.where(denominator < 0, -EQ4_FLOOR, EQ4_FLOOR).to(denominator.dtype)
    return torch.where(denominator.abs() < EQ4_FLOOR, floor, denominator)


def through_denominator(dout: Tensor, out: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of numerator and denominator of out; the latter is 0 where the floor acts."""
    dnumerator = dout / floored(denominator)
    ddenominator = -(dnumerator * out).sum(-1, keepdim=True)
    ddenominator.masked_fill_(denominator.abs() < EQ4_FLOOR, 0.0)
    return dnumerator, ddenominator


def write_quotient(out: Tensor, exact_out: Tensor, numerator: Tensor, denominator: Tensor) -> None:
    """Eq. 4's output, and, if it is to be kept, what it was before rounding."""
    quotient = numerator / floored(denominator)
    out.copy_(quotient)
    if exact_out.shape[-1] > 0:
        exact_out.copy_(quotient)


def write_sum(out: Tensor, product: Tensor, row: Tensor) -> None:
    """product + row into `out`, rounded once; row is float32 or float64."""
    if product.dtype == out.dtype == row.dtype:
        torch.add(product, row, out=out)
    else:
        out.copy_(product + row)


def token_sum(x: Tensor) -> Tensor:
    """Sum over the tokens, kept as a dimension of 1."""
    return x.sum(-2, keepdim=True, dtype=accumulator(x.dtype))


def first_mean(v: Tensor) -> Tensor:
    """The mean of the first values, (B, H, 1, E): near that of all, for the cost of a few."""
    first = v[:, :, :CHUNK]
    return token_sum(first) / max(first.shape[2], 1)


def centred(v: Tensor, mean: Tensor) -> Tensor:
    """v less a row, rounded to the dtype of v."""
    return (v - mean).to(v.dtype)


def slope(scale: float, gain: Tensor | None) -> float | Tensor:
    """The factor of the cosines in the weights."""
    return scale if gain is None else scale * gain


def groups(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors, cut along the batch; the size goes by the first."""
    return _cut(tensors, dim=0, least=1)


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors, cut along the tokens; the size goes by the first."""
    return _cut(tensors, dim=2, least=CHUNK)


def _cut(tensors: Sequence[Tensor], dim: int, least: int) -> Iterator[tuple[Tensor, ...]]:
    length, num_elements = tensors[0].shape[dim], max(tensors[0].numel(), 1)
    size = max(length, 1)
    if tensors[0].device.type == "cpu":
        size = max(_PIECE_ELEMENTS * length // num_elements, least)
    return zip(*(torch.split(x, size, dim=dim) for x in tensors), strict=True)


def operands(options: Options, *tensors: Tensor) -> list[Tensor]:
    """The tensors, contiguous, in the dtype that matrix products are to take.

    bfloat16 stays bfloat16 in Eq. 7's sums over many tokens. In a causal tile or a short sum the roundings of
    single weights would be seen, and Eq. 4's dq and dk are differences of parts that may be far larger.
    float16 lacks the range.
    """
    many = min(x.shape[2] for x in tensors) >= _MIN_BFLOAT16_TOKENS
    keep = many and not options.causal and not options.has_denominator
    low = (torch.float16,) if keep else (torch.float16, torch.bfloat16)
    return [(x.float() if x.dtype in low else x).contiguous() for x in tensors]


def sum_operands(gain: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    """The tensors in the dtype that S and dS are to be summed from.

    With a gain, the accumulator's: the gain's gradient is the product of S and dS and shows the roundings
    of both, and a large gain makes S the larger part of the output.
    """
    return list(tensors) if gain is None else [x.to(accumulator(x.dtype)) for x in tensors]
