"""Scaling laws of runs: loss over model size for each kind of attention, fitted, drawn and written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from clip_la.report.compare import compare
from clip_la.report.drawing import RC, EndLabel, add_end_labels, colour_of, label_log_axis, new_panels, save
from clip_la.report.fit import LawComparison, PowerLaw, compare_laws, fit_power_law, limits_of
from clip_la.report.runs import Run, RunError, read_runs
from clip_la.report.summary import RunSummary, attention_label, nan_to_none
from clip_la.report.tables import text_table
from clip_la.report.text import count, percent

TRAIN_LOSS = "train"


@dataclass(frozen=True)
class ScalingPoint:
    """One run as a point of the fit."""

    run: str
    attention: str
    num_parameters: int
    loss: float


@dataclass(frozen=True)
class Scaling:
    """Fits per kind of attention (by its label) and between kinds.

    Attributes:
        laws: attention -> law; a kind with fewer than two sizes has none, and `limits` says so.
        comparisons: (first, second) -> how the second stands to the first.
        colours: attention -> colour.
        limits: what the points cannot show.
    """

    loss_name: str
    points: tuple[ScalingPoint, ...]
    laws: dict[str, PowerLaw]
    comparisons: dict[tuple[str, str], LawComparison]
    colours: dict[str, str]
    limits: tuple[str, ...]


@dataclass(frozen=True)
class FitSummary:
    """What `write_fit` wrote, and the text to print."""

    paths: tuple[Path, ...]
    text: str


def fit_runs(runs: Sequence[Run], loss: str = TRAIN_LOSS, seed: int = 0) -> Scaling:
    """Fit L(N) = a N^-b over the runs of each kind of attention; N counts all parameters.

    Args:
        runs: with unique names, as `read_runs` gives them.
        loss: "train" (the final training loss of the tables), or the name of an evaluation that
            reports a loss, of which the last value is taken.
        seed: of the bootstrap.

    Raises:
        RunError: a run lacks that loss or its size, the loss isn't finite, or no kind has two sizes.
    """
    comparison = compare(runs)
    points = tuple(_point(summary, loss) for summary in comparison.summaries)
    kinds = list(dict.fromkeys(point.attention for point in points))
    laws, limits = {}, []
    for number, kind in enumerate(kinds):
        chosen = [point for point in points if point.attention == kind]
        try:
            laws[kind] = fit_power_law(
                [point.num_parameters for point in chosen],
                [point.loss for point in chosen],
                seed=seed + number,
            )
        except ValueError as error:
            limits.append(f"{kind}: not fitted: {error}.")
            continue
    if not laws:
        raise RunError("nothing to fit: " + " ".join(limits))
    for limit in dict.fromkeys(limit for law in laws.values() for limit in limits_of(law)):
        concerned = [kind for kind, law in laws.items() if limit in limits_of(law)]
        limits.append(f"{'; '.join(concerned)}: {limit}")
    return Scaling(
        loss_name=loss,
        points=points,
        laws=laws,
        comparisons={pair: compare_laws(laws[pair[0]], laws[pair[1]]) for pair in combinations(laws, 2)},
        colours={attention_label(run.attention): colour_of(run.attention) for run in runs},
        limits=(*limits, *_loss_floor(comparison.summaries), *(f.message for f in comparison.warnings)),
    )


def write_fit(run_dirs: Sequence[Path], out: Path, *, loss: str = TRAIN_LOSS, seed: int = 0) -> FitSummary:
    """Fit scaling laws over run folders; write scaling.png, .svg and .json into `out`.

    Raises:
        RunError: as `read_runs` and `fit_runs`.
    """
    scaling = fit_runs(read_runs(run_dirs), loss, seed)
    out.mkdir(parents=True, exist_ok=True)
    data = out / "scaling.json"
    data.write_text(scaling_json(scaling), encoding="utf-8")
    return FitSummary((data, *save(scaling_figure(scaling), out / "scaling")), scaling_text(scaling))


def scaling_text(scaling: Scaling) -> str:
    """Laws, comparisons and limits, to be printed."""
    rows = [
        [
            kind,
            f"{law.a:.4g} {_range(law.a_interval)}",
            f"{law.b:.4f} {_range(law.b_interval)}",
            str(law.num_sizes),
            str(law.num_points),
            percent(law.max_error, 2),
        ]
        for kind, law in scaling.laws.items()
    ]
    headers = ["L(N) = a N^-b", "a [95 %]", "b [95 %]", "Sizes", "Runs", "Largest error"]
    lines = [text_table(headers, rows), ""]
    lines += [_comparison_text(pair, comparison) for pair, comparison in scaling.comparisons.items()]
    return "\n".join(
        [*lines, "", "What this can't show, and what to know:", *(f"- {x}" for x in scaling.limits)]
    )


def scaling_json(scaling: Scaling) -> str:
    """The same for programs; bootstrap draws are left out."""
    laws = {kind: {k: v for k, v in vars(law).items() if k != "draws"} for kind, law in scaling.laws.items()}
    comparisons = [
        {"first": pair[0], "second": pair[1], **asdict(comparison)}
        for pair, comparison in scaling.comparisons.items()
    ]
    content = {
        "loss": scaling.loss_name,
        "points": [asdict(point) for point in scaling.points],
        "laws": laws,
        "comparisons": comparisons,
        "limits": scaling.limits,
    }
    return json.dumps(nan_to_none(content), indent=2, allow_nan=False) + "\n"


def scaling_figure(scaling: Scaling) -> Figure:
    """Points, laws and their bootstrap bands on two logarithmic axes."""
    with rc_context(RC):
        (figure,), (axes,) = new_panels(["Loss over model size"], stacked=True)
        axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="loss")
        labels = []
        for kind, colour in scaling.colours.items():
            chosen = [point for point in scaling.points if point.attention == kind]
            axes.plot(
                [p.num_parameters for p in chosen], [p.loss for p in chosen], "o", color=colour, markersize=6
            )
            law = scaling.laws.get(kind)
            if law is None:
                labels.append(EndLabel(kind, chosen[-1].num_parameters, chosen[-1].loss, colour))
                continue
            n = np.geomspace(*law.size_range, 50)
            axes.plot(n, law(n), color=colour, linewidth=1.8)
            axes.fill_between(n, *law.band(n), color=colour, alpha=0.15, linewidth=0)
            labels.append(EndLabel(f"{kind}, b = {law.b:.3f}", law.size_range[1], float(law(n)[-1]), colour))
        label_log_axis(axes.yaxis)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        add_end_labels(axes, labels)
    return figure


def _point(summary: RunSummary, loss: str) -> ScalingPoint:
    if summary.num_parameters is None:
        raise RunError(f"{summary.name}: its run_start has no num_parameters; it can't be placed by size")
    losses = {value.name: value.last for value in summary.validation} | {TRAIN_LOSS: summary.train_loss}
    if loss not in losses:
        raise RunError(f"{summary.name}: has no loss {loss!r}; it has {', '.join(losses)}")
    if not np.isfinite(losses[loss]):
        raise RunError(f"{summary.name}: its {loss} loss is not finite; leave the run out")
    return ScalingPoint(summary.name, summary.attention, summary.num_parameters, losses[loss])


def _loss_floor(summaries: Sequence[RunSummary]) -> list[str]:
    batches = sorted({summary.global_batch_size for summary in summaries if summary.global_batch_size})
    if len(batches) < 2:
        return []
    return [
        f"The global batch is not the same in all runs ({', '.join(map(str, batches))}): a contrastive "
        "loss is taken over as many negatives, and its level at guessing, ln B, moves with them. "
        "Part of the slope may be that."
    ]


def _comparison_text(pair: tuple[str, str], found: LawComparison) -> str:
    ratios = ", ".join(
        f"{ratio:.3f} {_range(interval)} at N = {count(size)}"
        for ratio, interval, size in zip(found.ratios, found.ratio_intervals, found.sizes, strict=True)
    )
    difference = f"{found.exponent_difference:+.4f} {_range(found.exponent_interval)}"
    return f"{pair[1]} over {pair[0]}: loss ratio {ratios}; b differs by {difference}: {found.verdict}."


def _range(interval: tuple[float, float]) -> str:
    return f"[{interval[0]:.4g}, {interval[1]:.4g}]"
