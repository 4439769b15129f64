"""What runs did with their machines, over samples seen: speed, waiting, memory, and what went missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, Formatter, FuncFormatter, MaxNLocator, PercentFormatter

from clip_la.report.drawing import RC, add_end_labels, end_label, looks_of, new_panels
from clip_la.report.points import TrainPoint
from clip_la.report.runs import Run


def _plain() -> Formatter:
    return EngFormatter(sep=" ")


def _number() -> Formatter:
    return FuncFormatter(lambda value, _: f"{value:g}")


def _percent() -> Formatter:
    return PercentFormatter(1.0, decimals=0, symbol=" %")


class _Panel(NamedTuple):
    """One figure of a log interval; shown where a run has a finite value, above 0 if it `counts` faults."""

    title: str
    axis: str
    value: Callable[[TrainPoint], float]
    formatter: Callable[[], Formatter]
    counts: bool = False


_PANELS = (
    _Panel("Samples a second", "", lambda point: point.samples_per_second, _plain),
    _Panel(
        "Waiting for data",
        "share of the time",
        lambda point: point.data_wait,
        _percent,
    ),
    _Panel(
        "Peak memory so far, rank 0",
        "GiB",
        lambda point: point.peak_memory_bytes / 2**30,
        _number,
    ),
    _Panel("Skipped steps so far", "", lambda point: point.skipped_steps, _plain, counts=True),
    _Panel("Lost samples so far", "", lambda point: point.lost_samples, _plain, counts=True),
)


def machine_figures(runs: Sequence[Run], *, stacked: bool = True) -> list[Figure]:
    """A panel a figure that was logged; skipped steps and lost samples where there are any."""
    shown = [panel for panel in _PANELS if any(_is_told(panel, point) for run in runs for point in run.train)]
    if not shown:
        return []
    looks = looks_of(runs)
    with rc_context(RC):
        figures, axes = new_panels([panel.title for panel in shown], stacked=stacked)
        for drawn, panel in zip(axes, shown, strict=True):
            ends = []
            for run in runs:
                look = looks[run.name]
                x = np.array([point.samples for point in run.train], dtype=np.float64)
                values = np.array([panel.value(point) for point in run.train])
                drawn.plot(x, values, color=look.colour, linestyle=look.line_style, linewidth=1.4)
                ends.append(end_label(look, x, values))
            drawn.set_xlim(left=0)
            drawn.set_ylim(bottom=0)
            drawn.set(xlabel="samples seen", ylabel=panel.axis)
            drawn.xaxis.set_major_formatter(EngFormatter(sep=" "))
            drawn.locator_params(axis="x", nbins=5)
            drawn.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=panel.counts))
            drawn.yaxis.set_major_formatter(panel.formatter())
            add_end_labels(drawn, ends)
    return figures


def _is_told(panel: _Panel, point: TrainPoint) -> bool:
    value = panel.value(point)
    return value > 0 if panel.counts else bool(np.isfinite(value))
