"""The measurements of `clip-la bench`, as rows: operators over lengths, whole models over image sizes."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from clip_la.attention import which
from clip_la.bench.models import Step, attention_share, build_model, step_call
from clip_la.bench.operators import (
    Operator,
    Shape,
    available_operators,
    ceiling_calls,
    error_of,
    forward_call,
    training_call,
)
from clip_la.bench.timing import Call, Times, peak_memory, time_calls

_ERROR_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 5e-3}
_ERROR_LENGTHS = (77, 197)


class ErrorGateError(RuntimeError):
    """An operator is wrong, so that its times mean nothing."""


@dataclass(frozen=True)
class Row:
    """One measurement: what, on what, how long, how much memory. Seconds are of one call.

    Attributes:
        subject: an operator or a ceiling ("eq7", "matmul"), or a model.
        passes: "forward", "forward+backward", or "step" for a training step of a model.
        size: tokens of an operator, pixels a side of a model.
        peak_bytes: memory above what was in use before; None where it wasn't measured.
        error: the largest relative RMS error against float64; None for ceilings and models.
        attention_share: part of a model's step spent in attention; None for operators.
    """

    level: str
    subject: str
    passes: str
    dtype: str
    causal: bool
    batch_size: int
    size: int
    seconds: float
    seconds_low: float
    seconds_high: float
    repeats: int
    peak_bytes: int | None = None
    error: float | None = None
    attention_share: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """For CSV and JSON."""
        return asdict(self)


@dataclass(frozen=True)
class OperatorSweep:
    """Which lengths, and on what.

    Attributes:
        batch_sizes: for each length.
        budget: seconds of repeats a length and kind of pass.
        max_call: an operator isn't run where one call would take more seconds than this.
    """

    lengths: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    num_heads: int
    head_size: int
    dtypes: tuple[torch.dtype, ...]
    causal: bool
    budget: float
    max_call: float

    def shapes(self) -> Iterator[Shape]:
        """By dtype, then by length."""
        for dtype in self.dtypes:
            for B, N in zip(self.batch_sizes, self.lengths, strict=True):
                yield Shape(B, self.num_heads, N, self.head_size, self.causal, dtype)


def gate_errors(sweep: OperatorSweep, device: torch.device) -> dict[tuple[str, torch.dtype], float]:
    """The error of each operator in each dtype, on lengths where float64 is cheap.

    Raises:
        ErrorGateError: one is above its dtype's bound.
    """
    errors: dict[tuple[str, torch.dtype], float] = {}
    for operator in available_operators(device, sweep.causal):
        for dtype in sweep.dtypes:
            shapes = [Shape(1, 2, N, sweep.head_size, sweep.causal, dtype) for N in _ERROR_LENGTHS]
            error = max(error_of(operator, shape, device) for shape in shapes)
            if not error <= _ERROR_BOUNDS[dtype]:
                raise ErrorGateError(
                    f"{operator.label} in {_name(dtype)} has a relative error of {error:.1e} against float64 "
                    f"(bound {_ERROR_BOUNDS[dtype]:.0e}); nothing is reported"
                )
            errors[operator.name, dtype] = error
    return errors


def sweep_operators(sweep: OperatorSweep, device: torch.device) -> Iterator[Row]:
    """All operators and ceilings, length by length."""
    errors = gate_errors(sweep, device)
    last: dict[tuple[str, torch.dtype], Row] = {}
    for shape in sweep.shapes():
        packed = shape.packed(device)
        operators = [
            operator
            for operator in available_operators(device, sweep.causal)
            if _expected_seconds(last.get((operator.name, shape.dtype)), shape) <= sweep.max_call
        ]
        for passes in ("forward", "forward+backward"):
            calls = _calls(operators, shape, packed, training=passes != "forward")
            times = time_calls(calls, device, budget=sweep.budget)
            for name, call in calls.items():
                row = replace(
                    _row("operator", name, passes, shape, times[name]),
                    peak_bytes=peak_memory(call, device),
                    error=errors.get((name, shape.dtype)),
                )
                last[name, shape.dtype] = row
                yield row
        del packed
        gc.collect()


def sweep_models(
    models: Sequence[str], steps: Sequence[Step], device: torch.device, *, budget: float
) -> Iterator[Row]:
    """A training step of each model, in turn, for each of `steps`."""
    for step in steps:
        calls = {name: step_call(build_model(name, step, device), step, device) for name in models}
        times = time_calls(calls, device, budget=budget)
        for name, call in calls.items():
            yield Row(
                level=f"{step.tower} towers" if step.tower == "both" else f"{step.tower} tower",
                subject=name,
                passes="step",
                dtype=step.precision,
                causal=False,
                batch_size=step.batch_size,
                size=step.image_size,
                seconds=times[name].median,
                seconds_low=times[name].low,
                seconds_high=times[name].high,
                repeats=times[name].repeats,
                peak_bytes=peak_memory(call, device),
                attention_share=attention_share(call, device),
            )
        del calls
        gc.collect()


def backends(sweep: OperatorSweep, device: torch.device) -> dict[str, str]:
    """Which backend serves Eq. 4 and Eq. 7, by dtype."""
    return {_name(dtype): which(device, dtype, head_size=sweep.head_size) for dtype in sweep.dtypes}


def fitted_slope(rows: Sequence[Row]) -> float:
    """b of seconds = a size^b, by least squares in logarithms; needs two sizes."""
    x = [math.log(row.size) for row in rows]
    y = [math.log(row.seconds) for row in rows]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)


def _calls(
    operators: Sequence[Operator], shape: Shape, packed: torch.Tensor, training: bool
) -> dict[str, Call]:
    make = training_call if training else forward_call
    calls = {operator.name: make(operator, shape, packed) for operator in operators}
    return calls | ceiling_calls(shape, packed, training)


def _expected_seconds(last: Row | None, shape: Shape) -> float:
    """Of a call, from the time of the last one: softmax takes the square of the length."""
    if last is None:
        return 0.0
    power = 2 if last.subject == "softmax" else 1
    return last.seconds * shape.B / last.batch_size * (shape.N / last.size) ** power


def _row(level: str, subject: str, passes: str, shape: Shape, times: Times) -> Row:
    return Row(
        level, subject, passes, _name(shape.dtype), shape.causal, shape.B, shape.N,
        times.median, times.low, times.high, times.repeats,
    )  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
