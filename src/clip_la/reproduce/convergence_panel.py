"""Convergence: held-out loss against samples, and zero-shot accuracy, of each kind over seeds."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from clip_la.report.axes import training_hours
from clip_la.report.drawing import RC, EndLabel, add_end_labels, colour_of, new_panels, save
from clip_la.report.kinds import t_interval
from clip_la.report.runs import Run, RunError, read_runs
from clip_la.report.summary import FloatArray, RunSummary, ZeroShot, attention_label, metric, summarise
from clip_la.report.text import count
from clip_la.reproduce.panel import Panel, Table
from clip_la.reproduce.verdicts import Claim, convergence_claim

VALIDATION = "validation"
_SEED_GAP = 0.16  # between the marks of two seeds, in rows of the figure


@dataclass(frozen=True)
class Curves:
    """The runs of one kind of attention, seed by seed.

    Attributes:
        label: of the attention.
        seeds: of the runs, in their order.
    """

    label: str
    colour: str
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]
    summaries: tuple[RunSummary, ...]

    @property
    def samples(self) -> list[int]:
        """Where all runs have a held-out loss."""
        seen = [{point.samples for point in run.evals if point.name == VALIDATION} for run in self.runs]
        return sorted(set.intersection(*seen))

    def losses(self, samples: int) -> list[float]:
        """Held-out losses there, run by run."""
        return [
            metric(point, "loss")
            for run in self.runs
            for point in run.evals
            if point.name == VALIDATION and point.samples == samples
        ]

    def minutes(self, samples: Sequence[int]) -> FloatArray:
        """Training time until then, without evaluating, mean over the runs: (n,)."""
        places = np.array(samples, dtype=np.float64)
        hours: FloatArray = np.mean([training_hours(run, places) for run in self.runs], axis=0)
        return 60 * hours

    def mean_losses(self) -> FloatArray:
        """Held-out losses at `samples`, mean over the runs: (n,)."""
        means: FloatArray = np.array([self.losses(samples) for samples in self.samples]).mean(axis=1)
        return means

    @property
    def zeroshot(self) -> list[ZeroShot | None]:
        """The last zero-shot result of each run; None of one that has none."""
        return [summary.zeroshot[0] if summary.zeroshot else None for summary in self.summaries]


def read_curves(folders: Mapping[str, Sequence[Path]]) -> dict[str, Curves]:
    """Kind -> its runs, from kind -> run folders, one a seed.

    Raises:
        RunError: a folder can't be read, or the runs of a kind have no held-out loss at equal samples.
    """
    curves = {}
    for kind, paths in folders.items():
        runs = read_runs(paths)
        curves[kind] = Curves(
            label=attention_label(runs[0].attention),
            colour=colour_of(runs[0].attention),
            seeds=tuple(run.config["seed"] for run in runs),
            runs=tuple(runs),
            summaries=tuple(map(summarise, runs)),
        )
        if not curves[kind].samples:
            raise RunError(
                f"{', '.join(map(str, paths))}: no held-out loss at equal samples; out.log says why"
            )
    return curves


def convergence_panel(curves: Mapping[str, Curves], facts: Mapping[str, str], folder: Path) -> Panel:
    """Draw and judge.

    Args:
        curves: kind -> runs; "softmax" is what the others are judged by.
        facts: on what they rest.
        folder: for the figure and its CSV.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_csv(folder / "convergence.csv", curves)
    found = list(curves.values())
    figure = save(_figure(found), folder / "convergence")[1]
    return Panel(
        name="convergence",
        title="Convergence",
        facts=facts,
        claims=_claims(curves),
        figures={"Loss: mean and range over seeds. Accuracy: each seed with its 95 % interval": figure},
        tables=[_table(found), _equal_time_table(found, curves["softmax"])],
        limits=[
            "Small models, a short training, a small set: the paper trained large ones on LAION-400M.",
            "One learning rate for all kinds; a kind that likes another would look worse than it is.",
            "At equal time a slower kind's learning rate has yet to fall: a shorter run would end better.",
        ],
        numbers={kind: _numbers(found) for kind, found in curves.items()},
    )


def _claims(curves: Mapping[str, Curves]) -> list[Claim]:
    pairs = [(kind, "softmax") for kind in curves if kind != "softmax"]
    if {"eq4", "eq7"} <= curves.keys():
        pairs.insert(2, ("eq7", "eq4"))
    return [_claim(curves[kind], curves[baseline]) for kind, baseline in pairs]


def _claim(found: Curves, baseline: Curves) -> Claim:
    samples = max(set(found.samples) & set(baseline.samples))
    by_seed = [dict(zip(c.seeds, c.losses(samples), strict=True)) for c in (found, baseline)]
    seeds = [seed for seed in by_seed[0] if seed in by_seed[1]]
    losses, baseline_losses = ([losses[seed] for seed in seeds] for losses in by_seed)
    return convergence_claim(found.label, baseline.label, losses, baseline_losses, samples)


def _figure(curves: Sequence[Curves]) -> Figure:
    has_zeroshot = any(result is not None for found in curves for result in found.zeroshot)
    with rc_context(RC):
        titles = ["Held-out loss by samples", "Held-out loss by time", *(["Zero-shot top-1"] * has_zeroshot)]
        (figure,), panels = new_panels(titles, stacked=True)
        _draw_losses(panels[0], curves, [np.array(found.samples) for found in curves])
        panels[0].set_xlabel("samples seen")
        panels[0].xaxis.set_major_formatter(EngFormatter(sep=" "))
        _draw_losses(panels[1], curves, [found.minutes(found.samples) for found in curves])
        panels[1].set_xlabel("minutes of training")
        if has_zeroshot:
            _draw_zeroshot(panels[2], curves)
    return figure


def _draw_losses(axes: Axes, curves: Sequence[Curves], positions: Sequence[FloatArray]) -> None:
    labels = []
    for found, x in zip(curves, positions, strict=True):
        losses = np.array([found.losses(samples) for samples in found.samples])
        mean = found.mean_losses()
        axes.plot(x, mean, color=found.colour, linewidth=1.8, marker="o", markersize=4)
        axes.fill_between(
            x, losses.min(axis=1), losses.max(axis=1), color=found.colour, alpha=0.2, linewidth=0
        )
        labels.append(EndLabel(found.label, x[-1], float(mean[-1]), found.colour))
    axes.set_ylabel("loss")
    add_end_labels(axes, labels)


def _draw_zeroshot(axes: Axes, curves: Sequence[Curves]) -> None:
    """One row a kind; its seeds one below the other."""
    labels = []
    for row, found in enumerate(curves):
        for place, result in enumerate(found.zeroshot):
            y = row + _SEED_GAP * (place - (len(found.zeroshot) - 1) / 2)
            if result is None:
                continue
            if result.top1_low is not None and result.top1_high is not None:
                axes.plot((result.top1_low, result.top1_high), (y, y), color=found.colour, linewidth=1.5)
            axes.plot(result.top1, y, "o", color=found.colour, markersize=4)
        labels.append(EndLabel(found.label, 1.0, row, found.colour))
    for chance in {result.chance for found in curves for result in found.zeroshot if result is not None}:
        if chance is not None:
            axes.axvline(chance, color=RC["text.color"], linewidth=1, linestyle=":")
    axes.set(xlabel="accuracy (dotted: chance)", xlim=(0, 1), ylim=(len(curves) - 0.5, -0.5))
    axes.set_yticks([])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    add_end_labels(axes, labels)


def _table(curves: Sequence[Curves]) -> Table:
    return Table(
        "After the last sample: mean over seeds [least, most]; accuracy with its 95 % interval over seeds",
        ["Attention", "Seeds", "Training loss", "Held-out loss", "Zero-shot top-1", "Samples/s, one core"],
        [
            [
                found.label,
                str(len(found.runs)),
                _mean_and_range([summary.train_loss for summary in found.summaries]),
                _mean_and_range(found.losses(found.samples[-1])),
                _accuracy([result.top1 for result in found.zeroshot if result is not None]),
                count(statistics.median(summary.samples_per_second for summary in found.summaries)),
            ]
            for found in curves
        ],
    )


def _equal_time_table(curves: Sequence[Curves], baseline: Curves) -> Table:
    """Mean losses where the first kind ends, and when each gets as far as the baseline gets in the end."""
    times = [found.minutes(found.samples) for found in curves]
    end = min(float(minutes[-1]) for minutes in times)
    target = float(baseline.mean_losses()[-1])
    rows = []
    for found, minutes in zip(curves, times, strict=True):
        losses = found.mean_losses()
        first = next((place for place, loss in enumerate(losses) if loss <= target), None)
        reached = "-" if first is None else f"{count(found.samples[first])} samples, {minutes[first]:.2g} min"
        samples_then, loss_then = (np.interp(end, minutes, values) for values in (found.samples, losses))
        rows.append([found.label, count(samples_then), f"{loss_then:.3f}", reached])
    return Table(
        f"After {end:.3g} minutes of training, when the first kind is done; and when each first gets to "
        f"{baseline.label}'s last held-out loss, {target:.3f} (means over seeds)",
        ["Attention", "Samples by then", "Held-out loss then", f"Reaches {baseline.label}'s last after"],
        rows,
    )


def _mean_and_range(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


def _accuracy(values: Sequence[float]) -> str:
    if not values:
        return "-"
    interval = t_interval(values)
    ends = "" if interval is None else f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"
    return f"{100 * statistics.fmean(values):.1f} %{ends}"


def _numbers(found: Curves) -> dict[str, Any]:
    return {
        "label": found.label,
        "seeds": list(found.seeds),
        "samples": found.samples,
        "losses": [found.losses(samples) for samples in found.samples],
        "train_losses": [summary.train_loss for summary in found.summaries],
        "top1": [result and [result.top1, result.top1_low, result.top1_high] for result in found.zeroshot],
        "samples_per_second": [summary.samples_per_second for summary in found.summaries],
        "minutes": [round(float(minutes), 4) for minutes in found.minutes(found.samples)],
    }


def _write_csv(path: Path, curves: Mapping[str, Curves]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["kind", "attention", "seed", "samples", "held_out_loss", "top1", "top1_low", "top1_high"]
        )
        writer.writerows(row for kind, found in curves.items() for row in _csv_rows(kind, found))


def _csv_rows(kind: str, found: Curves) -> Iterator[list[Any]]:
    """A row a held-out loss; the accuracy stands in the last one of a seed."""
    for place, seed in enumerate(found.seeds):
        for samples in found.samples:
            result = found.zeroshot[place] if samples == found.samples[-1] else None
            ends = [result.top1, result.top1_low, result.top1_high] if result else [""] * 3
            yield [kind, found.label, seed, samples, found.losses(samples)[place], *ends]
