"""Runs that differ only in their seed, grouped, and the groups compared seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clip_la.report.differences import HOUSEKEEPING_KEYS, fingerprint
from clip_la.report.runs import Run
from clip_la.report.summary import RunSummary
from clip_la.report.text import evaluation, setting

# Student's t at 97.5 % for 1 to 30 degrees of freedom; above, the normal distribution's within 2.1 %.
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL_975 = 1.960
_MAX_SETTINGS = 3  # in a label
_IDENTITY_KEYS = ("model", "num_parameters", "global_batch_size", "samples_total")

Interval = tuple[float, float]


@dataclass(frozen=True)
class Kind:
    """Runs whose configs are equal but for the seed, the name and settings that can't change what is learned.

    Attributes:
        label: the attention, and what else tells it from the other kinds.
        runs: seed -> run name.
        repeats: further runs of a seed that is there already; they are compared with nothing.
    """

    label: str
    runs: Mapping[Any, str]
    repeats: tuple[str, ...]


@dataclass(frozen=True)
class PairedDifference:
    """Two kinds on one metric, seed by seed: the second less the first.

    Attributes:
        seeds: that both have, with a finite value.
        interval: 95 % interval of the mean difference by Student's t; None with one seed.
    """

    metric: str
    first: str
    second: str
    seeds: tuple[Any, ...]
    first_mean: float
    second_mean: float
    differences: tuple[float, ...]
    mean: float
    interval: Interval | None

    @property
    def verdict(self) -> str:
        """What the seeds say."""
        if self.interval is None:
            return "one seed: can't be told from luck"
        if self.interval[0] <= 0 <= self.interval[1]:
            return f"{len(self.seeds)} seeds don't tell them apart"
        return f"differs beyond the scatter of {len(self.seeds)} seeds"


def find_kinds(runs: Sequence[Run], labels: Mapping[str, str]) -> tuple[Kind, ...]:
    """Group runs, in order of appearance.

    Args:
        runs: with unique names.
        labels: run name -> what its attention is called.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_identity(run), []).append(run)
    names = _group_labels(list(groups.values()), labels)
    return tuple(_kind(name, group) for name, group in zip(names, groups.values(), strict=True))


def paired_differences(
    kinds: Sequence[Kind], summaries: Sequence[RunSummary]
) -> tuple[PairedDifference, ...]:
    """Each kind against the baseline, on every metric and over the seeds that both have.

    The baseline is the first kind with softmax attention, else the first kind.
    """
    by_name = {summary.name: summary for summary in summaries}
    softmax = [kind for kind in kinds if by_name[next(iter(kind.runs.values()))].attention == "softmax"]
    baseline = (softmax or list(kinds))[0]
    values = {name: dict(_metrics(summary)) for name, summary in by_name.items()}
    metrics = dict.fromkeys(metric for found in values.values() for metric in found)
    return tuple(
        difference
        for metric in metrics
        for kind in kinds
        if kind is not baseline
        and (
            difference := _paired(metric, baseline, kind, {name: v.get(metric) for name, v in values.items()})
        )
    )


def t_interval(differences: Sequence[float]) -> Interval | None:
    """mean +- t s / sqrt(n), 95 %; None for fewer than two values."""
    n = len(differences)
    if n < 2:
        return None
    t = _T_975[n - 2] if n - 1 <= len(_T_975) else _NORMAL_975
    half = t * statistics.stdev(differences) / math.sqrt(n)
    mean = statistics.fmean(differences)
    return mean - half, mean + half


def _identity(run: Run) -> str:
    ignored = {"seed", *HOUSEKEEPING_KEYS}
    config = {key: value for key, value in run.config.items() if key.split(".")[0] not in ignored}
    started = [run.start.get(key) for key in _IDENTITY_KEYS]
    return fingerprint([config, run.attention.to_config(), started])


def _kind(label: str, group: Sequence[Run]) -> Kind:
    runs: dict[Any, str] = {}
    repeats = []
    for run in group:
        seed = run.config.get("seed")
        if seed in runs:
            repeats.append(run.name)
        else:
            runs[seed] = run.name
    return Kind(label, runs, tuple(repeats))


def _group_labels(groups: Sequence[Sequence[Run]], labels: Mapping[str, str]) -> list[str]:
    """The attention's name; where several share it, with the model, or else with what differs among them."""
    heads = [group[0] for group in groups]
    names = []
    for run in heads:
        alike = [head for head in heads if labels[head.name] == labels[run.name]]
        models = {head.start.get("model") for head in alike}
        name = labels[run.name]
        if len(models) > 1:
            name += f", {run.start.get('model')}"
        if len(models) < len(alike):
            name += _settings(run, alike)
        names.append(name)
    return [_numbered(names, i) for i in range(len(names))]


def _numbered(names: Sequence[str], i: int) -> str:
    """A name that is still not its own, with which of them it is."""
    return f"{names[i]} #{names[:i].count(names[i]) + 1}" if names.count(names[i]) > 1 else names[i]


def _settings(run: Run, alike: Sequence[Run]) -> str:
    skipped = {"seed", "model", "attention", *HOUSEKEEPING_KEYS}
    keys = dict.fromkeys(key for head in alike for key in head.config if key.split(".")[0] not in skipped)
    differing = [key for key in keys if len({fingerprint(head.config.get(key)) for head in alike}) > 1]
    return "".join(f", {key} {setting(run.config.get(key))}" for key in differing[:_MAX_SETTINGS])


def _metrics(summary: RunSummary) -> Iterator[tuple[str, float]]:
    yield "training loss", summary.train_loss
    for value in summary.validation:
        yield f"loss, {evaluation(value.name)}", value.last
    for result in summary.zeroshot:
        yield f"top-1, {evaluation(result.name)}", result.top1


def _paired(
    metric: str, first: Kind, second: Kind, values: Mapping[str, float | None]
) -> PairedDifference | None:
    pairs = {
        seed: (one, two)
        for seed in first.runs
        if seed in second.runs
        and (one := values[first.runs[seed]]) is not None
        and (two := values[second.runs[seed]]) is not None
        and math.isfinite(one)
        and math.isfinite(two)
    }
    if not pairs:
        return None
    differences = tuple(two - one for one, two in pairs.values())
    return PairedDifference(
        metric=metric,
        first=first.label,
        second=second.label,
        seeds=tuple(pairs),
        first_mean=statistics.fmean(one for one, _ in pairs.values()),
        second_mean=statistics.fmean(two for _, two in pairs.values()),
        differences=differences,
        mean=statistics.fmean(differences),
        interval=t_interval(differences),
    )
