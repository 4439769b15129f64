"""What curves are drawn against: samples seen, floating-point operations, hours of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clip_la.report.facts import ModelFacts
from clip_la.report.runs import Run
from clip_la.report.summary import FloatArray


@dataclass(frozen=True)
class XAxis:
    """An x axis: `key` names files and settings, `label` the axis, `meaning` says what is counted."""

    key: str
    label: str
    meaning: str

    @property
    def file_ending(self) -> str:
        """Of the names of figures; none for samples."""
        return "" if self.key == "samples" else f"-{self.key}"


SAMPLES = XAxis("samples", "samples seen", "Samples seen, each pair as often as it was drawn.")
FLOPS = XAxis(
    "flops",
    "training FLOPs",
    "Floating-point operations, estimated from the model's config: three forward passes a sample; what "
    "gradient checkpointing computes again is not counted.",
)
HOURS = XAxis(
    "hours",
    "hours of training",
    "Time in which samples were seen, over all restarts and with work that was undone; the gaps between "
    "jobs, evaluating and saving are not counted.",
)
AXES = (SAMPLES, FLOPS, HOURS)


def positions(axis: XAxis, run: Run, facts: ModelFacts, samples: FloatArray) -> FloatArray | None:
    """Where numbers of samples (n,) of a run lie on an axis (n,); None where that isn't known."""
    if axis == FLOPS:
        return None if facts.sample_flops is None else samples * facts.sample_flops
    if axis == HOURS:
        return training_hours(run, samples)
    return samples


def training_hours(run: Run, samples: FloatArray) -> FloatArray:
    """`HOURS` of a run after numbers of samples (n,), between two training lines by interpolation."""
    seen = np.array([0, *(point.samples for point in run.train)], dtype=np.float64)
    seconds = np.array([0, *(point.seconds for point in run.train)])
    return np.interp(samples, seen, seconds / 3600)


def usable_axes(runs: Sequence[Run], facts: Mapping[str, ModelFacts]) -> tuple[XAxis, ...]:
    """The axes on which at least one run can be drawn."""
    nothing = np.zeros(0)
    return tuple(
        axis
        for axis in AXES
        if any(positions(axis, run, facts[run.name], nothing) is not None for run in runs)
    )
