"""How figures of runs are drawn: looks of runs, panels that stay readable on a phone, labels, files.

One colour a kind of attention (Okabe and Ito's, told apart by colour-blind people), one line style a
kind of run in that colour, each curve labelled at its end; runs that differ only in their seed look
alike and share a label. Axes have a fixed size in inches, so text keeps its size whatever the labels.
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
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from clip_la.attention.spec import AttentionSpec
from clip_la.report.kinds import find_kinds
from clip_la.report.runs import Run
from clip_la.report.summary import FloatArray, attention_label

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
class Look:
    """How a run is drawn, and what its curves are labelled."""

    colour: str
    line_style: LineStyle
    label: str


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
    if spec.centre_values:
        return "#009e73"
    if spec.gain != "none":
        return "#cc79a7"
    return "#0072b2" if (spec.scale, spec.output_norm) == ("none", "none") else "#56b4e9"


def looks_of(runs: Sequence[Run]) -> dict[str, Look]:
    """Run name -> look: the first of a colour is solid, the others are told apart by dashes.

    The seeds of a kind share a look; a run that repeats a seed has its own.
    """
    by_name = {run.name: run for run in runs}
    seen: dict[str, int] = {}
    looks: dict[str, Look] = {}
    for kind in find_kinds(runs, {run.name: attention_label(run.attention) for run in runs}):
        for names in (list(kind.runs.values()), *([name] for name in kind.repeats)):
            colour = colour_of(by_name[names[0]].attention)
            style = LINE_STYLES[seen.get(colour, 0) % len(LINE_STYLES)]
            seen[colour] = seen.get(colour, 0) + 1
            looks |= {name: Look(colour, style, kind.label if len(names) > 1 else name) for name in names}
    return looks


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write STEM.png and STEM.svg on white."""
    png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
    figure.savefig(png, dpi=160, facecolor=PAPER)
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

    Equal labels become one, in their middle. Many labels are smaller. Call it when the limits are final.
    """
    placed = [(label, _axes_fraction(axes, label), _wrapped(label.text)) for label in _merged(labels)]
    placed.sort(key=lambda item: item[1][1])
    heights = [_LINE_HEIGHT * (text.count("\n") + 1) for _, _, text in placed]
    shrink = min(1.0, 1 / max(sum(heights), 1e-9))
    heights = [shrink * height for height in heights]
    centres = _spread([y for _, (_, y), _ in placed], heights)
    for (label, end, text), centre in zip(placed, centres, strict=True):
        axes.annotate(
            text,
            xy=end,
            xytext=(1.06, centre),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=label.colour,
            fontsize=shrink * _FONT_SIZE,
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


def new_panels(titles: Sequence[str], *, stacked: bool) -> tuple[list[Figure], list[Axes]]:
    """Axes of fixed size: one below the other in one figure, or each in a figure of its own."""
    groups = [list(titles)] if stacked else [[title] for title in titles]
    width = _LEFT + _AXES_INCHES[0] + _RIGHT
    panel_height = _BOTTOM + _AXES_INCHES[1] + _TOP
    figures, panels = [], []
    for group in groups:
        figure = Figure(figsize=(width, panel_height * len(group)))
        figures.append(figure)
        for row, title in enumerate(group):
            bottom = (len(group) - 1 - row) * panel_height + _BOTTOM
            place = np.array([_LEFT, bottom, *_AXES_INCHES]) / np.tile(figure.get_size_inches(), 2)
            left, bottom, axes_width, axes_height = map(float, place)
            panels.append(figure.add_axes((left, bottom, axes_width, axes_height)))
            panels[-1].set_title(title, loc="left")
    return figures, panels


def end_label(look: Look, x: FloatArray, values: FloatArray) -> EndLabel:
    """A run's label, at the last finite point of its curve; without one at the start, on the axis."""
    finite = np.flatnonzero(np.isfinite(values))
    if not finite.size:
        return EndLabel(look.label, float(x[0]), math.nan, look.colour)
    return EndLabel(look.label, float(x[finite[-1]]), float(values[finite[-1]]), look.colour)


def _axes_fraction(axes: Axes, label: EndLabel) -> tuple[float, float]:
    x, y = (axes.transData + axes.transAxes.inverted()).transform((label.x, label.y))
    return float(np.clip(x, 0, 1)), float(np.clip(y, 0, 1)) if math.isfinite(y) else 0.0


def _merged(labels: Sequence[EndLabel]) -> list[EndLabel]:
    groups: dict[str, list[EndLabel]] = {}
    for label in labels:
        groups.setdefault(label.text, []).append(label)
    return [_middle(group) for group in groups.values()]


def _middle(group: Sequence[EndLabel]) -> EndLabel:
    heights = [label.y for label in group if math.isfinite(label.y)]
    y = sum(heights) / len(heights) if heights else math.nan
    text = group[0].text + (f", {len(group)} seeds" if len(group) > 1 else "")
    return EndLabel(text, max(label.x for label in group), y, group[0].colour)


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
