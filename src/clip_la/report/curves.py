"""Losses and accuracies of runs as curves over samples, FLOPs or hours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from clip_la.report.axes import SAMPLES, XAxis, positions
from clip_la.report.drawing import (
    INK,
    RC,
    EndLabel,
    Look,
    add_end_labels,
    end_label,
    label_log_axis,
    looks_of,
    new_panels,
)
from clip_la.report.facts import ModelFacts
from clip_la.report.runs import EvalPoint, Run
from clip_la.report.summary import WINDOW, FloatArray, by_name, chance_of, metric, smooth_losses
from clip_la.report.text import evaluation

SMOOTHING = f"line: mean of the last {WINDOW:.0%}\nfaint: each log interval"


@dataclass(frozen=True)
class _Scene:
    """The runs that can be drawn on an x axis, and how."""

    runs: Sequence[Run]
    facts: Mapping[str, ModelFacts]
    looks: Mapping[str, Look]
    axis: XAxis

    @classmethod
    def of(cls, runs: Sequence[Run], facts: Mapping[str, ModelFacts], axis: XAxis) -> _Scene:
        """The runs that can be drawn on an axis."""
        drawable = [run for run in runs if positions(axis, run, facts[run.name], np.zeros(0)) is not None]
        return cls(drawable, facts, looks_of(runs), axis)

    def x(self, run: Run, samples: Sequence[int]) -> FloatArray:
        """Where numbers of samples of a run lie on the axis."""
        found = positions(self.axis, run, self.facts[run.name], np.array(samples, dtype=np.float64))
        assert found is not None  # of a drawable run
        return found

    def finish(self, panels: Sequence[Axes], ends: Sequence[Sequence[EndLabel]]) -> None:
        """Limits, axis labels and the labels of the curves."""
        for axes, labels in zip(panels, ends, strict=True):
            axes.set_xlim(left=0)
            axes.set_xlabel(self.axis.label)
            axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
            axes.locator_params(axis="x", nbins=5)
            add_end_labels(axes, labels)


def loss_figures(
    runs: Sequence[Run],
    facts: Mapping[str, ModelFacts],
    axis: XAxis = SAMPLES,
    *,
    log_axis: bool = False,
    stacked: bool = True,
) -> list[Figure]:
    """Training loss, raw (faint) and smoothed as in the tables; then one panel a validation loss.

    A log interval whose loss was not finite is marked with a cross on the axis. Runs of which the
    position on the x axis isn't known are not drawn. One figure if `stacked`, else one a panel.
    """
    scene = _Scene.of(runs, facts, axis)
    names = _eval_names(scene.runs, "loss")
    with rc_context(RC):
        titles = ["Training loss", *(f"Loss, {evaluation(name)}" for name in names)]
        figures, panels = new_panels(titles, stacked=stacked)
        ends = [_draw_training(panels[0], scene)]
        ends += [_draw_evals(axes, scene, name, "loss") for axes, name in zip(panels[1:], names, strict=True)]
        for axes in panels:
            axes.set_ylabel("loss")
            if log_axis:
                axes.set_yscale("log")
                label_log_axis(axes.yaxis)
        panels[0].text(
            0.99, 0.98, SMOOTHING, transform=panels[0].transAxes, ha="right", va="top", fontsize="x-small"
        )
        scene.finish(panels, ends)
    return figures


def zeroshot_figures(
    runs: Sequence[Run], facts: Mapping[str, ModelFacts], axis: XAxis = SAMPLES, *, stacked: bool = True
) -> list[Figure]:
    """Zero-shot top-1 with 95 % intervals and the level of chance, one panel a set; none without any."""
    scene = _Scene.of(runs, facts, axis)
    names = _eval_names(scene.runs, "top1")
    if not names:
        return []
    with rc_context(RC):
        figures, panels = new_panels([f"Top-1, {evaluation(name)}" for name in names], stacked=stacked)
        ends = [_draw_evals(axes, scene, name, "top1") for axes, name in zip(panels, names, strict=True)]
        for axes, name in zip(panels, names, strict=True):
            _draw_chance(axes, scene.runs, name)
            axes.set_ylabel("accuracy")
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
            axes.set_ylim(bottom=0.0)
        scene.finish(panels, ends)
    return figures


def _draw_training(axes: Axes, scene: _Scene) -> list[EndLabel]:
    ends = []
    for run in scene.runs:
        look = scene.looks[run.name]
        x = scene.x(run, [point.samples for point in run.train])
        losses = np.array([point.loss for point in run.train])
        smooth = smooth_losses(run.train)
        axes.plot(x, losses, color=look.colour, alpha=0.25, linewidth=0.8)
        axes.plot(x, smooth, color=look.colour, linestyle=look.line_style, linewidth=1.8)
        broken = x[~np.isfinite(losses)]
        on_axis = axes.get_xaxis_transform()
        zeros = np.zeros(broken.size)
        axes.plot(broken, zeros, "x", markersize=5, color=look.colour, transform=on_axis, clip_on=False)
        ends.append(end_label(look, x, smooth))
    return ends


def _draw_evals(axes: Axes, scene: _Scene, name: str, key: str) -> list[EndLabel]:
    ends = []
    for run in scene.runs:
        points = by_name(run.evals, key).get(name, [])
        if not points:
            continue
        look = scene.looks[run.name]
        x = scene.x(run, [point.samples for point in points])
        values, low, high = (
            np.array([metric(point, key + bound) for point in points]) for bound in ("", "_low", "_high")
        )
        axes.errorbar(
            x,
            values,
            yerr=np.nan_to_num(np.clip([values - low, high - values], 0, None)),
            color=look.colour,
            linestyle=look.line_style,
            marker="o",
            markersize=4,
            linewidth=1.8,
            elinewidth=0.9,
        )
        ends.append(end_label(look, x, values))
    return ends


def _draw_chance(axes: Axes, runs: Sequence[Run], name: str) -> None:
    points: list[EvalPoint] = [point for run in runs for point in run.evals if point.name == name]
    for chance in sorted({level for level in map(chance_of, points) if level is not None}):
        axes.axhline(chance, color=INK, linewidth=1, linestyle=":")
        axes.text(0.01, chance, "chance", transform=axes.get_yaxis_transform(), va="bottom", fontsize="small")


def _eval_names(runs: Sequence[Run], key: str) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in by_name(run.evals, key)))
