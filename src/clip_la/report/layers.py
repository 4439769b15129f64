"""Diagnostics of runs as figures: attention layer by layer, and gradients by tower against samples seen."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from clip_la.report.drawing import (
    RC,
    EndLabel,
    Look,
    add_end_labels,
    end_label,
    looks_of,
    new_panels,
)
from clip_la.report.points import TrainPoint
from clip_la.report.runs import Run


class _Figure(NamedTuple):
    """How a figure of a layer is shown."""

    title: str
    axis: str
    log: bool


_FIGURES = {
    "output_to_residual": _Figure("attention output", "relative to the residual", log=True),
    "query_to_constant": _Figure("query-dependent part", "relative to the constant part", log=True),
    "entropy": _Figure("entropy of the weights", "1: uniform", log=False),
    "effective_rank": _Figure("effective rank of the weights", "1: all queries alike", log=True),
}
_MEANINGLESS = {("text", "effective_rank")}
"""A causal matrix of weights has a high rank also where all queries attend alike."""
_TRAIN_FIGURES = {
    "grad_norm_image": _Figure("Gradient norm, image tower", "before clipping", log=True),
    "grad_norm_text": _Figure("Gradient norm, text tower", "before clipping", log=True),
    "logit_scale": _Figure("Logit scale", "", log=False),
}


def layers_figures(runs: Sequence[Run], *, stacked: bool = True) -> list[Figure]:
    """The last diagnostics of each run over the layers, the first ones faint; none without any."""
    measured = [run for run in runs if run.diagnostics]
    panels = [
        (tower, name)
        for tower in ("image", "text")
        for name in _FIGURES
        if (tower, name) not in _MEANINGLESS
        and any(_by_layer(run.diagnostics[-1].layers, tower, name) for run in measured)
    ]
    if not panels:
        return []
    titles = [f"{tower.capitalize()}: {_FIGURES[name].title}" for tower, name in panels]
    with rc_context(RC):
        figures, axes = new_panels(titles, stacked=stacked)
        for panel, (tower, name) in zip(axes, panels, strict=True):
            ends = list(_draw_layers(panel, measured, looks_of(runs), tower, name))
            _finish(panel, _FIGURES[name], ends, "layer")
            panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    return figures


def gradients_figures(runs: Sequence[Run], *, stacked: bool = True) -> list[Figure]:
    """Gradient norms by tower and the logit scale against samples seen; none for runs without diagnostics."""
    measured = [run for run in runs if any(np.isfinite(point.grad_norm_image) for point in run.train)]
    if not measured:
        return []
    with rc_context(RC):
        figures, axes = new_panels([shown.title for shown in _TRAIN_FIGURES.values()], stacked=stacked)
        for panel, (name, shown) in zip(axes, _TRAIN_FIGURES.items(), strict=True):
            ends = list(_draw_train(panel, measured, looks_of(runs), name))
            panel.set_xlim(left=0)
            panel.xaxis.set_major_formatter(EngFormatter(sep=" "))
            panel.locator_params(axis="x", nbins=5)
            _finish(panel, shown, ends, "samples seen")
    return figures


def _by_layer(layers: Mapping[str, float], tower: str, name: str) -> dict[int, float]:
    """Layer -> figure, in order of layers, of one measurement."""
    found = (re.fullmatch(rf"{tower}/(\d+)/{name}", key) for key in layers)
    return dict(sorted((int(match[1]), layers[match[0]]) for match in found if match))


def _draw_layers(
    axes: Axes, runs: Sequence[Run], looks: Mapping[str, Look], tower: str, name: str
) -> Iterator[EndLabel]:
    for run in runs:
        first, last = (_by_layer(run.diagnostics[i].layers, tower, name) for i in (0, -1))
        if not last:
            continue
        look = looks[run.name]
        if len(run.diagnostics) > 1:
            axes.plot(list(first), list(first.values()), color=look.colour, alpha=0.35, linewidth=0.9)
        layers, values = np.array(list(last), dtype=np.float64), np.array(list(last.values()))
        (line,) = axes.plot(layers, values, marker="o", markersize=4, linewidth=1.8)
        line.set(color=look.colour, linestyle=look.line_style)
        yield end_label(look, layers, values)


def _draw_train(axes: Axes, runs: Sequence[Run], looks: Mapping[str, Look], name: str) -> Iterator[EndLabel]:
    for run in runs:
        look = looks[run.name]
        samples = np.array([point.samples for point in run.train], dtype=np.float64)
        values = np.array([_value(point, name) for point in run.train])
        axes.plot(samples, values, color=look.colour, linestyle=look.line_style, linewidth=1.4)
        yield end_label(look, samples, values)


def _value(point: TrainPoint, name: str) -> float:
    return float(getattr(point, name))


def _finish(axes: Axes, shown: _Figure, ends: Sequence[EndLabel], x_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(shown.axis)
    if shown.log and any(np.any(np.asarray(line.get_ydata(), dtype=np.float64) > 0) for line in axes.lines):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    add_end_labels(axes, ends)
