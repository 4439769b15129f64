"""The lines of a run's metrics.jsonl as values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrainPoint:
    """One log interval. `loss` is its mean; NaN where it was not finite or a field was not logged.

    `seconds` is the time spent training until then, over all sessions. `peak_memory_bytes` is rank 0's so
    far in its session. `grad_norm_image` and `grad_norm_text` are logged by runs with diagnostics.
    """

    samples: int
    loss: float
    samples_per_second: float
    data_wait: float
    skipped_steps: int
    lost_samples: int
    seconds: float
    peak_memory_bytes: float = math.nan
    logit_scale: float = math.nan
    grad_norm_image: float = math.nan
    grad_norm_text: float = math.nan


@dataclass(frozen=True)
class EpochPoint:
    """One virtual epoch: its mean loss, and the samples lost by cause since the run began."""

    samples: int
    epoch: int
    loss: float
    losses: Mapping[str, int]


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation: the evaluator's name and its metrics."""

    samples: int
    name: str
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class DiagnosticsPoint:
    """The attention layers measured once: "TOWER/LAYER/FIGURE" -> value, NaN where it was not finite."""

    samples: int
    layers: Mapping[str, float]


@dataclass(frozen=True)
class RunEnd:
    """Where and why a session ended: "finished", "non_finite", or a signal's name."""

    samples: int
    reason: str


def train_point(line: Mapping[str, Any]) -> TrainPoint:
    """Of a `train` line; what older runs didn't write is NaN or 0."""
    return TrainPoint(
        samples=int(line["samples"]),
        loss=_float(line["loss"]),
        samples_per_second=_float(line.get("samples_per_second")),
        data_wait=_float(line.get("data_wait")),
        skipped_steps=int(line.get("skipped_steps") or 0),
        lost_samples=int(line.get("lost_samples") or 0),
        seconds=_float(line.get("training_seconds")),
        peak_memory_bytes=_float(line.get("peak_memory_bytes")),
        logit_scale=_float(line.get("logit_scale")),
        grad_norm_image=_float(line.get("grad_norm_image")),
        grad_norm_text=_float(line.get("grad_norm_text")),
    )


def epoch_point(line: Mapping[str, Any]) -> EpochPoint:
    """Of an `epoch` line."""
    losses = {str(cause): int(count) for cause, count in (line.get("losses") or {}).items()}
    return EpochPoint(int(line["samples"]), line["epoch"], _float(line["loss"]), losses)


def eval_point(line: Mapping[str, Any]) -> EvalPoint:
    """Of an `eval` line."""
    return EvalPoint(int(line["samples"]), line["name"], line["metrics"])


def diagnostics_point(line: Mapping[str, Any]) -> DiagnosticsPoint:
    """Of a `diagnostics` line."""
    return DiagnosticsPoint(int(line["samples"]), {key: _float(v) for key, v in line["layers"].items()})


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)
