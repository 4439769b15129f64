"""The paper's figure of time against length, from rows: log-log, with the slope of each line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from clip_la.bench.operators import CEILINGS
from clip_la.bench.sweep import Row, fitted_slope

_COLOURS = {
    "softmax": "#000000",
    "eq4": "#e69f00",
    "eq7": "#0072b2",
    "fla": "#cc79a7",
    "fbi_la": "#009e73",
    "matmul": "#999999",
    "copy": "#bbbbbb",
}
_LABELS = {"softmax": "softmax", "eq4": "Eq. 4", "eq7": "Eq. 7", "matmul": "bare products", "copy": "copy"}
_SLOPE_FROM = 1000  # tokens


def plot_times(rows: Sequence[Row], title: str, paths: Sequence[Path]) -> None:
    """Forward + backward seconds against tokens, one panel a dtype, to each path (PNG, SVG)."""
    rows = [row for row in rows if row.level == "operator" and row.passes == "forward+backward"]
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    with rc_context(
        {"font.size": 12, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "clip_la"}
    ):
        figure = Figure(figsize=(5.5 * len(dtypes), 4.6), layout="constrained")
        for axes, dtype in zip(figure.subplots(1, len(dtypes), squeeze=False)[0], dtypes, strict=True):
            _draw(axes, [row for row in rows if row.dtype == dtype])
            axes.set_title(dtype)
        figure.suptitle(title, fontsize=12)
        for path in paths:
            figure.savefig(path, dpi=160)


def slope_rows(rows: Sequence[Row]) -> list[Row]:
    """Those that a slope is fitted to: long enough that fixed costs don't hide how the time grows."""
    return [row for row in rows if row.size >= _SLOPE_FROM]


def _draw(axes: Axes, rows: Sequence[Row]) -> None:
    for subject in dict.fromkeys(row.subject for row in rows):
        line = [row for row in rows if row.subject == subject]
        sizes, seconds = [row.size for row in line], [row.seconds for row in line]
        style = "--" if subject in CEILINGS else "-"
        colour = _COLOURS.get(subject, "#d55e00")
        axes.loglog(
            sizes, seconds, style, marker="o", markersize=4, color=colour, label=_label(subject, line)
        )
        spread = [row.seconds_low for row in line], [row.seconds_high for row in line]
        axes.fill_between(sizes, *spread, color=colour, alpha=0.2, linewidth=0)
    axes.set_xlabel("tokens")
    axes.set_ylabel("seconds, forward + backward")
    axes.grid(True, which="major", color="#dddddd")
    axes.legend(frameon=False, fontsize=10)


def _label(subject: str, rows: Sequence[Row]) -> str:
    label = _LABELS.get(subject, subject)
    long = slope_rows(rows)
    return f"{label}: N^{fitted_slope(long):.2f}" if len(long) > 1 else label
