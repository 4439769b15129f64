"""One run in numbers: what a row of a comparison says."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from clip_la.attention.spec import AttentionSpec
from clip_la.report.points import EvalPoint, TrainPoint
from clip_la.report.runs import Run
from clip_la.report.text import duration, setting

FloatArray = npt.NDArray[np.float64]

WINDOW = 0.1
"""A smoothed loss is the mean over this share, the last, of the samples seen by then; so is the final one."""

_SILENCE_SECONDS = 15 * 60.0


@dataclass(frozen=True)
class Validation:
    """An evaluation that reports a loss: its best (smallest) and last value. NaN if not finite."""

    name: str
    best: float
    best_samples: int
    last: float
    last_samples: int


@dataclass(frozen=True)
class ZeroShot:
    """The last zero-shot evaluation on one set. Accuracies are fractions; None where not reported.

    `classes` and `templates` name what was evaluated, with the hash that tells it from another of that name.
    """

    name: str
    samples: int
    top1: float
    top1_low: float | None
    top1_high: float | None
    top5: float | None
    chance: float | None
    num_images: int | None
    best_top1: float
    classes: str | None
    templates: str | None


@dataclass(frozen=True)
class RunSummary:
    """A run in numbers.

    Attributes:
        train_loss: mean over the last `WINDOW` of the samples seen; NaN if the last line is.
        epoch_loss: mean over the last whole virtual epoch; None before the first has ended.
        samples_per_second: median over log intervals.
        data_wait: mean share of the time spent waiting for data.
        lost_by_cause: as of the last whole epoch, so it can add up to less than `lost_samples`.
        state: "finished", "running" or "stopped (why)".
        peak_memory_bytes: the most that rank 0 has held; None where it was not logged.
        hours: logged time, with what was undone by resumes.
        training_hours: the part of it in which samples were seen, without saving and evaluating.
        undone_hours: the part of that whose work was undone by resumes.
    """

    name: str
    model: str
    attention: str
    num_parameters: int | None
    global_batch_size: int | None
    samples: int
    samples_total: int | None
    seed: Any
    train_loss: float
    epoch_loss: float | None
    validation: tuple[Validation, ...]
    zeroshot: tuple[ZeroShot, ...]
    samples_per_second: float
    data_wait: float
    skipped_steps: int
    lost_samples: int
    lost_by_cause: dict[str, int]
    num_non_finite: int
    state: str
    num_resumes: int
    peak_memory_bytes: int | None
    hours: float
    training_hours: float
    undone_hours: float


def summarise(run: Run, now: float | None = None) -> RunSummary:
    """Boil a run down. `now` (unix seconds, default the clock) tells a running from a killed run."""
    last = run.train[-1] if run.train else None
    return RunSummary(
        name=run.name,
        model=str(run.start.get("model", "unknown")),
        attention=attention_label(run.attention),
        num_parameters=run.start.get("num_parameters"),
        global_batch_size=run.start.get("global_batch_size"),
        samples=run.samples,
        samples_total=run.start.get("samples_total"),
        seed=run.config.get("seed"),
        train_loss=float(smooth_losses(run.train)[-1]) if last else math.nan,
        epoch_loss=run.epochs[-1].loss if run.epochs else None,
        validation=tuple(_validation(name, points) for name, points in by_name(run.evals, "loss").items()),
        zeroshot=tuple(_zeroshot(name, points) for name, points in by_name(run.evals, "top1").items()),
        samples_per_second=_median([point.samples_per_second for point in run.train]),
        data_wait=_mean([point.data_wait for point in run.train]),
        skipped_steps=last.skipped_steps if last else 0,
        lost_samples=last.lost_samples if last else 0,
        lost_by_cause=dict(run.epochs[-1].losses) if run.epochs else {},
        num_non_finite=sum(not math.isfinite(point.loss) for point in run.train),
        state=_state(run, time.time() if now is None else now),
        num_resumes=run.num_resumes,
        peak_memory_bytes=_peak_memory(run.train),
        hours=run.seconds / 3600,
        training_hours=run.training_seconds / 3600,
        undone_hours=run.undone_seconds / 3600,
    )


_NAMED_OPTIONS = ("kind", "gain", "scale", "output_norm", "normalise_qk", "centre_values")
_DEFAULTS = {field.name: field.default for field in fields(AttentionSpec)}


def attention_label(spec: AttentionSpec) -> str:
    """What people call it: "softmax", "Eq. 4", "Eq. 7 + gain, 1/N"."""
    label = {"softmax": "softmax", "eq4": "Eq. 4", "eq7": "Eq. 7"}[spec.kind]
    if spec.gain != "none":
        label += " + gain" if spec.gain == "learned" else f" + gain {spec.gain:g}"
    if spec.scale != "none":
        label += ", 1/N" if spec.scale == "length" else f", scale {spec.scale:.3g}"
    if spec.output_norm == "rms":
        label += ", RMS norm"
    if not spec.normalise_qk:
        label += ", raw q and k"
    if spec.centre_values:
        label += ", centred"
    others = {name: getattr(spec, name) for name in _DEFAULTS if name not in _NAMED_OPTIONS}
    changed = {name: value for name, value in others.items() if value != _DEFAULTS[name]}
    return label + "".join(f", {name} {setting(value)}" for name, value in changed.items())


def smooth_losses(points: Sequence[TrainPoint]) -> FloatArray:
    """Per line, the mean loss over the last `WINDOW` of the samples seen by then; NaN where the line is NaN.

    Each line counts by the samples of its interval; lines that are not finite are left out of others'
    means.
    """
    samples = np.array([0, *(point.samples for point in points)], dtype=np.float64)
    losses = np.array([point.loss for point in points], dtype=np.float64)
    finite = np.isfinite(losses)
    weights = np.where(finite, np.diff(samples), 0.0)
    # Differences of running sums would lose digits over a long run; windows are short, so sum each.
    first = np.searchsorted(samples[1:], (1 - WINDOW) * samples[1:], side="right")
    means = np.full(len(points), np.nan)
    for i in np.flatnonzero(finite):
        window = slice(min(first[i], i), i + 1)
        weight = weights[window].sum()
        means[i] = np.dot(weights[window], np.nan_to_num(losses[window])) / weight if weight else losses[i]
    return means


def by_name(evals: Sequence[EvalPoint], metric: str) -> dict[str, list[EvalPoint]]:
    """Evaluations that report `metric`, grouped by their name in order of samples."""
    groups: dict[str, list[EvalPoint]] = {}
    for point in sorted(evals, key=lambda point: point.samples):
        if metric in point.metrics:
            groups.setdefault(point.name, []).append(point)
    return groups


def metric(point: EvalPoint, key: str) -> float:
    """A metric as a number; NaN where it was not finite or is not there."""
    value = point.metrics.get(key)
    return math.nan if value is None else float(value)


def chance_of(point: EvalPoint) -> float | None:
    """Top-1 accuracy of guessing: reported, or one over the number of classes."""
    if point.metrics.get("chance") is not None:
        return float(point.metrics["chance"])
    num_classes = point.metrics.get("num_classes")
    return 1 / num_classes if num_classes else None


def _validation(name: str, points: Sequence[EvalPoint]) -> Validation:
    finite = [point for point in points if math.isfinite(metric(point, "loss"))]
    best = min(finite or points, key=lambda point: metric(point, "loss"))
    last = points[-1]
    return Validation(name, metric(best, "loss"), best.samples, metric(last, "loss"), last.samples)


def _zeroshot(name: str, points: Sequence[EvalPoint]) -> ZeroShot:
    last = points[-1]
    return ZeroShot(
        name=name,
        samples=last.samples,
        top1=metric(last, "top1"),
        top1_low=last.metrics.get("top1_low"),
        top1_high=last.metrics.get("top1_high"),
        top5=last.metrics.get("top5"),
        chance=chance_of(last),
        num_images=last.metrics.get("num_images"),
        best_top1=max(metric(point, "top1") for point in points),
        classes=_named(last, "class_list"),
        templates=_named(last, "templates"),
    )


def _named(point: EvalPoint, key: str) -> str | None:
    name, digest = point.metrics.get(key), point.metrics.get(f"{key}_hash")
    return f"{name} ({digest})" if name and digest else name


def _state(run: Run, now: float) -> str:
    if run.end is not None:
        return "finished" if run.end.reason == "finished" else f"stopped ({run.end.reason})"
    silent = now - run.last_time
    if silent <= _SILENCE_SECONDS:
        return "running"
    return f"stopped (no end logged, silent for {duration(silent)})"


def _peak_memory(points: Sequence[TrainPoint]) -> int | None:
    known = [point.peak_memory_bytes for point in points if math.isfinite(point.peak_memory_bytes)]
    return int(max(known)) if known else None


def _median(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def nan_to_none(value: Any) -> Any:
    """The same nested value with every non-finite number as None, which JSON can hold."""
    if isinstance(value, dict):
        return {key: nan_to_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [nan_to_none(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
