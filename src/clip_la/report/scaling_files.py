"""Fitted scaling laws as text, JSON, CSV, and as the figure of the paper."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from clip_la.report.drawing import RC, EndLabel, add_end_labels, label_log_axis, new_panels, save
from clip_la.report.fit import FloorLaw, Interval, PowerLaw
from clip_la.report.law_comparison import LawComparison, Ratio
from clip_la.report.runs import read_usable_runs
from clip_la.report.scaling import Parameters, Scaling, ScalingPoint, fit_runs, size_of
from clip_la.report.summary import nan_to_none
from clip_la.report.tables import text_table
from clip_la.report.text import EMPTY, count, percent


@dataclass(frozen=True)
class FitSummary:
    """What `write_fit` wrote, the text to print, and everything found."""

    paths: tuple[Path, ...]
    text: str
    scaling: Scaling


def write_fit(
    run_dirs: Sequence[Path],
    out: Path,
    *,
    loss: str = "validation",
    parameters: Parameters = "image",
    at: Sequence[float] = (),
    seed: int = 0,
) -> FitSummary:
    """Fit scaling laws over run folders and write them into the folder `out`, over earlier ones.

    The files are scaling.json, scaling.csv, scaling-laws.csv, scaling.png and scaling.svg. Runs that are
    empty or damaged are left out, by name. Arguments as in `fit_runs`.

    Raises:
        RunError: as `read_usable_runs` and `fit_runs`.
    """
    runs, left_out = read_usable_runs(run_dirs)
    scaling = fit_runs(runs, loss=loss, parameters=parameters, at=at, seed=seed, left_out=left_out)
    texts = {
        "scaling.json": scaling_json(scaling),
        "scaling.csv": points_csv(scaling),
        "scaling-laws.csv": laws_csv(scaling),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    figures = save(scaling_figure(scaling), out / "scaling")
    return FitSummary((*(out / name for name in texts), *figures), scaling_text(scaling), scaling)


def scaling_text(scaling: Scaling) -> str:
    """Laws, comparisons and limits, to be printed."""
    parts = [
        f"L: {scaling.loss_name} loss{_negatives(scaling)}; N: {_WHAT[scaling.parameters]}",
        text_table(
            ["L = a N^-b", "a [95 %]", "b [95 %]", "Sizes", "Runs", "Largest error"],
            [_law_row(kind, law) for kind, law in scaling.laws.items()],
        ),
    ]
    if scaling.floors:
        rows = [_floor_row(kind, law) for kind, law in scaling.floors.items()]
        headers = ["L = a N^-b + c", "a [95 %]", "b [95 %]", "c [95 %]", "Largest error", "Is c determined?"]
        parts.append(text_table(headers, rows))
    if scaling.comparisons:
        rows = [row for pair, found in scaling.comparisons.items() for row in _ratio_rows(pair, found)]
        parts.append(text_table(["Second over first", "Of", "Ratio [95 %]"], rows))
        parts.append(
            "\n".join(s for pair, found in scaling.comparisons.items() for s in found.sentences(*pair))
        )
    parts.append("\n".join(["What this can't show, and what to know:", *(f"- {x}" for x in scaling.limits)]))
    return "\n\n".join(parts)


def scaling_json(scaling: Scaling) -> str:
    """The same for programs; bootstrap draws are left out."""
    comparisons = [
        {
            "first": pair[0],
            "second": pair[1],
            **asdict(found),
            "verdict": found.verdict,
            "sentences": found.sentences(*pair),
        }
        for pair, found in scaling.comparisons.items()
    ]
    content = {
        "loss": scaling.loss_name,
        "parameters": scaling.parameters,
        "points": [asdict(point) for point in scaling.points],
        "laws": {kind: _without_draws(law) for kind, law in scaling.laws.items()},
        "laws_with_floor": {kind: asdict(law) for kind, law in scaling.floors.items()},
        "comparisons": comparisons,
        "limits": scaling.limits,
    }
    return json.dumps(nan_to_none(content), indent=2, allow_nan=False) + "\n"


def points_csv(scaling: Scaling) -> str:
    """A row a run: all its parameters, its loss, and what the laws give there."""
    return _csv([_point_row(scaling, point) for point in scaling.points])


def laws_csv(scaling: Scaling) -> str:
    """A row a law: its numbers and their intervals."""
    laws: list[tuple[str, PowerLaw | FloorLaw]] = [*scaling.laws.items(), *scaling.floors.items()]
    return _csv([{"attention": kind, **_flat(_without_draws(law))} for kind, law in laws])


def scaling_figure(scaling: Scaling) -> Figure:
    """Points, laws and their bootstrap bands on two logarithmic axes, the laws' equations in the legend.

    A law with a floor is dashed, and drawn where its points determine the floor.
    """
    with rc_context(RC):
        (figure,), (axes,) = new_panels([f"Loss ({scaling.loss_name}) over size"], stacked=True)
        axes.set(xscale="log", yscale="log", xlabel=_WHAT[scaling.parameters], ylabel="loss")
        labels = [_draw_kind(axes, scaling, kind, colour) for kind, colour in scaling.colours.items()]
        label_log_axis(axes.yaxis)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        axes.legend(loc="lower left", fontsize="x-small", frameon=False, handlelength=1.4)
        _make_room(axes, len(scaling.colours))
        add_end_labels(axes, labels)
    return figure


_WHAT = {
    "image": "parameters of the image tower",
    "text": "parameters of the text tower",
    "total": "parameters, both towers",
}


def _draw_kind(axes: Axes, scaling: Scaling, kind: str, colour: str) -> EndLabel:
    chosen = [point for point in scaling.points if point.attention == kind]
    sizes, losses = [size_of(p, scaling.parameters) for p in chosen], [p.loss for p in chosen]
    axes.plot(sizes, losses, "o", color=colour, markersize=5)
    law = scaling.laws.get(kind)
    if law is None:
        return EndLabel(kind, sizes[-1], losses[-1], colour)
    n = np.geomspace(*law.size_range, 50)
    axes.plot(n, law(n), color=colour, linewidth=1.8, label=f"${_significant(law.a)}\\,N^{{{-law.b:+.3f}}}$")
    axes.fill_between(n, *law.band(n), color=colour, alpha=0.15, linewidth=0)
    floor = scaling.floors.get(kind)
    if floor is not None and floor.problem is None:
        equation = f"${_significant(floor.a)}\\,N^{{{-floor.b:+.3f}}} + {floor.c:.3g}$"
        axes.plot(n, floor(n), color=colour, linewidth=1.2, linestyle=(0, (4, 2)), label=equation)
    return EndLabel(kind, law.size_range[1], float(law(n)[-1]), colour)


def _significant(value: float) -> str:
    """Three digits as TeX: 593, 1.23e5 as 1.23 x 10^5."""
    mantissa, exponent = f"{value:.2e}".split("e")
    if -2 <= int(exponent) <= 3:
        return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return rf"{mantissa} \cdot 10^{{{int(exponent)}}}"


def _make_room(axes: Axes, num_kinds: int) -> None:
    """Below the lowest point, for the legend."""
    low, high = axes.get_ylim()
    axes.set_ylim(low * (low / high) ** (0.12 * num_kinds), high)


def _law_row(kind: str, law: PowerLaw) -> list[str]:
    a, b = f"{law.a:.4g} {_range(law.a_interval)}", f"{law.b:.4f} {_range(law.b_interval)}"
    return [kind, a, b, str(law.num_sizes), str(law.num_points), percent(law.max_error, 2)]


def _floor_row(kind: str, law: FloorLaw) -> list[str]:
    a, b = f"{law.a:.4g} {_range(law.a_interval)}", f"{law.b:.4f} {_range(law.b_interval)}"
    c = f"{law.c:.4f} {_range(law.c_interval)}"
    return [kind, a, b, c, percent(law.max_error, 2), "yes" if law.problem is None else f"no: {law.problem}"]


def _ratio_rows(pair: tuple[str, str], found: LawComparison) -> list[list[str]]:
    name = f"{pair[1]} / {pair[0]}"
    rows = [[name, "a", _ratio(found.a_ratio)], [name, "b", _ratio(found.b_ratio)]]
    for prediction in found.predictions:
        beyond = ", beyond the points" if prediction.is_beyond else ""
        rows.append([name, f"loss at N = {count(prediction.size)}{beyond}", _ratio(prediction.ratio)])
    return rows


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.4g} {_range(ratio.interval)}"


def _range(interval: Interval) -> str:
    return f"[{interval[0]:.4g}, {interval[1]:.4g}]"


def _negatives(scaling: Scaling) -> str:
    number = scaling.points[0].num_negatives
    return "" if number is None else f" at {number} negatives"


def _point_row(scaling: Scaling, point: ScalingPoint) -> dict[str, Any]:
    size = size_of(point, scaling.parameters)
    row = {key: value for key, value in asdict(point).items() if key != "parameters"}
    counts = {f"{name}_parameters": point.parameters.get(name, EMPTY) for name in _WHAT}
    fitted = {"law": scaling.laws.get(point.attention), "law_with_floor": scaling.floors.get(point.attention)}
    return {
        **row,
        **counts,
        **{name: "" if law is None else float(law(size)) for name, law in fitted.items()},
    }


def _without_draws(law: PowerLaw | FloorLaw) -> dict[str, Any]:
    return {key: value for key, value in vars(law).items() if key != "draws"}


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Pairs as two columns, `_low` and `_high`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, tuple):
            flat |= {f"{key}_low": value[0], f"{key}_high": value[1]}
        else:
            flat[key] = value
    return flat


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    buffer = io.StringIO()
    header = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(buffer, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
