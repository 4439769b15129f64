"""Curves against samples seen, as matplotlib figures that stay readable on a phone.

One colour a kind of attention (Okabe and Ito's, told apart by colour-blind people), one line style a
run of that kind, each curve labelled at its end. Axes have a fixed size in inches, so text keeps its
size whatever the labels.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from clip_la.attention.spec import AttentionSpec
from clip_la.report.runs import EvalPoint, Run
from clip_la.report.summary import FloatArray, by_name, chance_of, metric, smooth_losses
from clip_la.report.text import evaluation

INK = "#222222"
GRID = "#dddddd"
PAPER = "#ffffff"
LineStyle: TypeAlias = str | tuple[float, tuple[float, ...]]
LINE_STYLES: tuple[LineStyle, ...] = (
    "-",
    (0, (5, 2)),
    (0, (1.5, 1.5)),
    (0, (6, 2, 1, 2)),
)

_AXES_INCHES = (3.3, 2.8)
_LEFT, _RIGHT, _BOTTOM, _TOP = 0.85, 1.5, 0.7, 0.4
_FONT_SIZE = 13
_LABEL_CHARACTERS = 13
_LINE_HEIGHT = 1.2 * _FONT_SIZE / 72 / _AXES_INCHES[1]  # in axes heights
RC: dict[Any, Any] = {
    "font.size": _FONT_SIZE,
    "font.family": "DejaVu Sans",
    "axes.titlesize": _FONT_SIZE,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
    "svg.fonttype": "path",
}


@dataclass(frozen=True)
class EndLabel:
    """A curve's label, and the point of the curve's end in data coordinates."""

    text: str
    x: float
    y: float
    colour: str


def colour_of(spec: AttentionSpec) -> str:
    """The colour of a kind of attention, the same in every figure."""
    if spec.kind == "softmax":
        return "#7f7f7f"
    if spec.kind == "eq4":
        return "#e69f00" if spec.normalise_qk else "#d55e00"
    if spec.gain != "none":
        return "#009e73" if spec.output_norm == "none" else "#cc79a7"
    return "#0072b2" if (spec.scale, spec.output_norm) == ("none", "none") else "#56b4e9"


def line_styles(runs: Sequence[Run]) -> dict[str, LineStyle]:
    """Run name -> line style: the first run of a colour is solid, the others are told apart by dashes."""
    seen: dict[str, int] = {}
    styles: dict[str, LineStyle] = {}
    for run in runs:
        colour = colour_of(run.attention)
        styles[run.name] = LINE_STYLES[seen.get(colour, 0) % len(LINE_STYLES)]
        seen[colour] = seen.get(colour, 0) + 1
    return styles


def loss_figure(runs: Sequence[Run], log_axis: bool = False) -> Figure:
    """Training loss, raw (faint) and smoothed as in the tables; below it one panel a validation loss.

    A log interval whose loss was not finite is marked with a cross on the axis.
    """
    names = _eval_names(runs, "loss")
    with rc_context(RC):
        figure, panels = new_panels(["Training loss", *(f"Loss, {evaluation(name)}" for name in names)])
        ends = [_draw_training(panels[0], runs)]
        ends += [_draw_evals(axes, runs, name, "loss") for axes, name in zip(panels[1:], names, strict=True)]
        for axes in panels:
            axes.set_ylabel("loss")
            if log_axis:
                axes.set_yscale("log")
                label_log_axis(axes.yaxis)
        return _finish(figure, panels, ends)


def zeroshot_figure(runs: Sequence[Run]) -> Figure | None:
    """Zero-shot top-1 with 95 % intervals and the level of chance, one panel a set; None without any."""
    names = _eval_names(runs, "top1")
    if not names:
        return None
    with rc_context(RC):
        figure, panels = new_panels([f"Top-1, {evaluation(name)}" for name in names])
        ends = [_draw_evals(axes, runs, name, "top1") for axes, name in zip(panels, names, strict=True)]
        for axes, name in zip(panels, names, strict=True):
            _draw_chance(axes, runs, name)
            axes.set_ylabel("accuracy")
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
            axes.set_ylim(bottom=0.0)
        return _finish(figure, panels, ends)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write STEM.png and STEM.svg on white."""
    png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
    figure.savefig(png, dpi=200, facecolor=PAPER)
    svg.write_text(svg_text(figure, stem.name, PAPER), encoding="utf-8")
    return [png, svg]


def svg_text(figure: Figure, name: str, background: str = "none") -> str:
    """The figure as SVG, the same text each time; `name` keeps ids of figures on one page apart."""
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    buffer = io.StringIO()
    with rc_context({**RC, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", facecolor=background, metadata=no_metadata)
    return buffer.getvalue()


def label_log_axis(axis: Axis) -> None:
    """Plain numbers on a logarithmic axis, several a decade: losses seldom span one."""
    axis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def add_end_labels(axes: Axes, labels: Sequence[EndLabel]) -> None:
    """Label curves right of the axes, spread so that no two overlap, each joined to its end by a line.

    Call it when the limits are final.
    """
    placed = [(label, _axes_fraction(axes, label), _wrapped(label.text)) for label in labels]
    placed.sort(key=lambda item: item[1][1])
    heights = [_LINE_HEIGHT * (text.count("\n") + 1) for _, _, text in placed]
    centres = _spread([y for _, (_, y), _ in placed], heights)
    for (label, end, text), centre in zip(placed, centres, strict=True):
        axes.annotate(
            text,
            xy=end,
            xytext=(1.06, centre),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=label.colour,
            va="center",
            linespacing=1.05,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": label.colour,
                "linewidth": 0.8,
                "alpha": 0.6,
                "relpos": (0, 0.5),
                "shrinkB": 0,
            },
        )


def new_panels(titles: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """Axes of fixed size, one below the other."""
    width = _LEFT + _AXES_INCHES[0] + _RIGHT
    panel_height = _BOTTOM + _AXES_INCHES[1] + _TOP
    figure = Figure(figsize=(width, panel_height * len(titles)))
    panels = []
    for row, title in enumerate(titles):
        bottom = (len(titles) - 1 - row) * panel_height + _BOTTOM
        left, bottom, *size = np.array([_LEFT, bottom, *_AXES_INCHES]) / np.tile(figure.get_size_inches(), 2)
        panels.append(figure.add_axes((left, bottom, size[0], size[1])))
        panels[-1].set_title(title, loc="left")
    return figure, panels


def _draw_training(axes: Axes, runs: Sequence[Run]) -> list[EndLabel]:
    styles = line_styles(runs)
    ends = []
    for run in runs:
        colour = colour_of(run.attention)
        samples = np.array([point.samples for point in run.train], dtype=np.float64)
        losses = np.array([point.loss for point in run.train])
        smooth = smooth_losses(run.train)
        axes.plot(samples, losses, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(samples, smooth, color=colour, linestyle=styles[run.name], linewidth=1.8)
        broken = samples[~np.isfinite(losses)]
        on_axis = axes.get_xaxis_transform()
        axes.plot(
            broken, np.zeros(broken.size), "x", markersize=5, color=colour, transform=on_axis, clip_on=False
        )
        ends.append(end_label(run, samples, smooth))
    return ends


def _draw_evals(axes: Axes, runs: Sequence[Run], name: str, key: str) -> list[EndLabel]:
    styles = line_styles(runs)
    ends = []
    for run in runs:
        points = by_name(run.evals, key).get(name, [])
        if not points:
            continue
        samples = np.array([point.samples for point in points], dtype=np.float64)
        values, low, high = (
            np.array([metric(point, key + bound) for point in points]) for bound in ("", "_low", "_high")
        )
        axes.errorbar(
            samples,
            values,
            yerr=np.nan_to_num(np.clip([values - low, high - values], 0, None)),
            color=colour_of(run.attention),
            linestyle=styles[run.name],
            marker="o",
            markersize=4,
            linewidth=1.8,
            elinewidth=0.9,
        )
        ends.append(end_label(run, samples, values))
    return ends


def end_label(run: Run, samples: FloatArray, values: FloatArray) -> EndLabel:
    """The run's name, at the last finite point of its curve; without one at the start, on the axis."""
    finite = np.flatnonzero(np.isfinite(values))
    colour = colour_of(run.attention)
    if not finite.size:
        return EndLabel(run.name, float(samples[0]), math.nan, colour)
    return EndLabel(run.name, float(samples[finite[-1]]), float(values[finite[-1]]), colour)


def _draw_chance(axes: Axes, runs: Sequence[Run], name: str) -> None:
    points: list[EvalPoint] = [point for run in runs for point in run.evals if point.name == name]
    for chance in sorted({level for level in map(chance_of, points) if level is not None}):
        axes.axhline(chance, color=INK, linewidth=1, linestyle=":")
        axes.text(0.01, chance, "chance", transform=axes.get_yaxis_transform(), va="bottom", fontsize="small")


def _finish(figure: Figure, panels: Sequence[Axes], ends: Sequence[Sequence[EndLabel]]) -> Figure:
    for axes, labels in zip(panels, ends, strict=True):
        axes.set_xlim(left=0)
        axes.set_xlabel("samples seen")
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        axes.locator_params(axis="x", nbins=5)
        add_end_labels(axes, labels)
    return figure


def _eval_names(runs: Sequence[Run], key: str) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in by_name(run.evals, key)))


def _axes_fraction(axes: Axes, label: EndLabel) -> tuple[float, float]:
    x, y = (axes.transData + axes.transAxes.inverted()).transform((label.x, label.y))
    return float(np.clip(x, 0, 1)), float(np.clip(y, 0, 1)) if math.isfinite(y) else 0.0


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _LABEL_CHARACTERS, max_lines=3, placeholder="…"))


def _spread(centres: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Move sorted centres apart as little as it takes that the boxes around them don't overlap.

    Least squares: less the space that the boxes below need, centres must not decrease, so they are
    pooled into means where they do (isotonic regression). All are kept under 1, the title's place.
    """
    below = np.cumsum(heights) - np.array(heights) / 2
    pools: list[tuple[float, int]] = []
    for target in np.array(centres) - below:
        mean, size = float(target), 1
        while pools and pools[-1][0] > mean:
            other, other_size = pools.pop()
            mean, size = (mean * size + other * other_size) / (size + other_size), size + other_size
        pools.append((mean, size))
    starts = np.repeat([mean for mean, _ in pools], [size for _, size in pools])
    return list(np.minimum(starts, 1 - sum(heights)) + below)
