"""Runs side by side: how their configs differ, and what would make a comparison of them wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from clip_la.report.runs import Run
from clip_la.report.summary import RunSummary, ZeroShot, summarise
from clip_la.report.text import evaluation, percent, setting

ABSENT = "(not recorded)"
"""Stands for the value of a key that a run's config does not have."""

EXPECTED_KEYS = ("model", "attention")
"""What runs are compared over; a difference in these is no warning."""

DATA_KEYS = (
    "train_data",
    "train_num_samples",
    "dataset_type",
    "dataset_resampled",
    "train_data_upsampling_factors",
    "empty_caption",
    "aug_cfg",
    "zeroshot",
    "classnames",
    "templates",
    "val_data",
    "val_num_samples",
)

EVALUATION_KEYS = (
    "num_images",
    "num_classes",
    "class_list_hash",
    "templates_hash",
    "num_pairs",
    "num_negatives",
)

HOUSEKEEPING_KEYS = (
    "name",
    "logs",
    "resume",
    "workers",
    "save_frequency",
    "save_every_samples",
    "save_every_minutes",
    "keep_last",
    "log_every_n_steps",
    "log_level",
    "report_to",
    "wandb_project_name",
    "wandb_notes",
    "dist_timeout_minutes",
)
"""Settings that can't change what is learned; their differences are listed without a warning."""

_HIGH_DATA_WAIT = 0.2
_SAME_SIZE = 0.01


@dataclass(frozen=True)
class Finding:
    """Something the reader must know before believing a comparison.

    A "warning" makes the numbers wrong or not comparable; a "note" is only good to know.
    """

    severity: Literal["warning", "note"]
    message: str
    runs: tuple[str, ...]


@dataclass(frozen=True)
class ConfigDifference:
    """`differs`: key -> run name -> value, `ABSENT` where a run lacks the key; `equal`: key -> value.

    The versions of the software that each run recorded are among the keys, as `versions.NAME`.
    """

    differs: dict[str, dict[str, Any]]
    equal: dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    summaries: tuple[RunSummary, ...]
    config: ConfigDifference
    findings: tuple[Finding, ...]

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "warning")


def compare(runs: Sequence[Run], now: float | None = None) -> Comparison:
    """Compare runs with unique names. `now` (unix seconds) as in `summarise`."""
    summaries = tuple(summarise(run, now) for run in runs)
    config = config_difference(runs)
    findings = _between(runs, summaries, config)
    for run, summary in zip(runs, summaries, strict=True):
        findings += _within(run, summary)
    findings.sort(key=lambda finding: finding.severity, reverse=True)  # warnings first, else in order
    return Comparison(summaries, config, tuple(findings))


def config_difference(runs: Sequence[Run]) -> ConfigDifference:
    """Which config keys and software versions differ between runs, and which are equal."""
    configs = {run.name: {**run.config, **_versions(run)} for run in runs}
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    differs, equal = {}, {}
    for key in keys:
        values = {name: config.get(key, ABSENT) for name, config in configs.items()}
        if len({_fingerprint(value) for value in values.values()}) > 1:
            differs[key] = values
        else:
            equal[key] = next(iter(values.values()))
    return ConfigDifference(differs, equal)


def _versions(run: Run) -> dict[str, Any]:
    versions = run.start.get("versions")
    return {f"versions.{key}": value for key, value in versions.items()} if isinstance(versions, dict) else {}


def _fingerprint(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _between(runs: Sequence[Run], summaries: Sequence[RunSummary], config: ConfigDifference) -> list[Finding]:
    """Findings from what differs between runs."""
    facts: dict[str, dict[str, Any]] = {
        "the global batch size": {s.name: s.global_batch_size for s in summaries},
        "the planned number of samples": {s.name: s.samples_total for s in summaries},
        "the number of samples seen": {s.name: s.samples for s in summaries},
        "the seed": config.differs.get("seed", {}),
        **{f"the data ({key})": config.differs.get(key, {}) for key in DATA_KEYS},
        **_evaluation_facts(runs),
    }
    findings = [
        Finding("warning", f"The runs differ in {what}: {_groups(values)}.", tuple(values))
        for what, values in facts.items()
        if len({_fingerprint(value) for value in values.values()}) > 1
    ]
    explained = {"seed", "batch_size", "accum_freq", "epochs", *EXPECTED_KEYS, *DATA_KEYS, *HOUSEKEEPING_KEYS}
    for key, values in config.differs.items():
        if key.split(".")[0] not in explained:
            severity: Literal["warning", "note"] = "note" if key.startswith("versions.") else "warning"
            findings.append(Finding(severity, f"The runs differ in {key}: {_groups(values)}.", tuple(values)))
    return findings + _sizes(summaries)


def _evaluation_facts(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """What the last evaluations of one name were taken over; metrics compare only where it is equal."""
    facts: dict[str, dict[str, Any]] = {}
    for run in runs:
        last = {point.name: point.metrics for point in run.evals}  # in order of samples
        for name, metrics in last.items():
            for key in EVALUATION_KEYS:
                if key in metrics:
                    facts.setdefault(f"{key} of {evaluation(name)}", {})[run.name] = metrics[key]
    return facts


def _sizes(summaries: Sequence[RunSummary]) -> list[Finding]:
    sizes = {s.name: s.num_parameters for s in summaries if s.num_parameters}
    if not sizes or max(sizes.values()) <= min(sizes.values()) * (1 + _SAME_SIZE):
        return []
    return [Finding("note", f"The models differ in size: {_groups(sizes)} parameters.", tuple(sizes))]


def _groups(values: Mapping[str, Any]) -> str:
    """ "128 (a, b); 256 (c)": each value once, with the runs that have it."""
    names: dict[str, list[str]] = {}
    for name, value in values.items():
        names.setdefault("unknown" if value is None else setting(value), []).append(name)
    return "; ".join(f"{value} ({', '.join(group)})" for value, group in names.items())


def _within(run: Run, summary: RunSummary) -> list[Finding]:
    """Findings about one run alone."""
    warnings = [
        *_training_problems(run, summary),
        *_folder_problems(run),
        *_evaluation_problems(run, summary),
    ]
    return [
        *(Finding("warning", f"{run.name}: {text}.", (run.name,)) for text in warnings),
        *(Finding("note", f"{run.name}: {text}.", (run.name,)) for text in _remarks(run)),
    ]


def _training_problems(run: Run, summary: RunSummary) -> Iterator[str]:
    if summary.num_non_finite:
        yield f"its loss was not finite in {summary.num_non_finite} log interval(s)"
    if summary.skipped_steps:
        yield f"skipped {summary.skipped_steps} step(s) that were not finite"
    if summary.lost_samples:
        yield _lost(summary)
    if summary.state != "finished":
        yield f"is not finished: {summary.state}, {_progress(summary)}"
    elif summary.samples < (summary.samples_total or 0):
        yield f"says it is finished, but saw only {_progress(summary)}"
    # A softmax contrastive loss over a batch of B starts at about ln B, the loss of guessing.
    batch = 0 if run.config.get("siglip") else summary.global_batch_size or 0
    if batch > 1 and summary.train_loss >= math.log(batch):
        guessing = f"ln {batch} = {math.log(batch):.3f}"
        yield f"its training loss {summary.train_loss:.3f} is not below guessing ({guessing})"
    if summary.data_wait > _HIGH_DATA_WAIT:
        yield f"waited for data {percent(summary.data_wait, 0)} of the time, so its speed is the loader's"


def _folder_problems(run: Run) -> Iterator[str]:
    if run.num_restarts:
        yield f"was begun again from nothing {run.num_restarts} time(s) in its folder"
    if run.backward_lines:
        lines = _some(run.backward_lines)
        yield (
            f"its metrics go back in samples at line(s) {lines} without a resume; "
            "did two jobs write into one folder?"
        )


def _evaluation_problems(run: Run, summary: RunSummary) -> Iterator[str]:
    for point in run.failed_evals:
        yield f"{evaluation(point.name)} failed at {setting(point.samples)} samples; out.log says why"
    unreadable = {point.name: point.metrics.get("num_unreadable") for point in run.evals}
    for name, num_images in unreadable.items():
        if num_images:
            yield f"{num_images} image(s) of {evaluation(name)} could not be read and don't count"
    for result in summary.zeroshot:
        yield from _zeroshot_problems(result, summary.samples)


def _zeroshot_problems(result: ZeroShot, samples: int) -> Iterator[str]:
    name = evaluation(result.name)
    low = result.top1 if result.top1_low is None else result.top1_low
    if math.isnan(result.top1):
        yield f"its top-1 on {name} is not a number"
    elif result.chance is not None and low <= result.chance:
        levels = f"{percent(result.top1)} against {percent(result.chance, 2)}"
        yield f"its top-1 on {name} can't be told from chance: {levels}"
    if result.samples < samples:
        yield f"was last evaluated on {name} at {setting(result.samples)} of its {setting(samples)} samples"


def _remarks(run: Run) -> Iterator[str]:
    if run.num_resumes:
        yield f"was resumed {run.num_resumes} time(s); {run.num_undone_lines} undone line(s) are left out"
    if run.num_torn_lines:
        yield f"{run.num_torn_lines} torn line(s) of its metrics are left out"


def _lost(summary: RunSummary) -> str:
    causes = ", ".join(f"{cause} {count}" for cause, count in summary.lost_by_cause.items() if count)
    return f"lost {summary.lost_samples} sample(s) that could not be used" + (
        f" ({causes})" if causes else ""
    )


def _progress(summary: RunSummary) -> str:
    total = summary.samples_total
    seen = f"{setting(summary.samples)} samples"
    return f"{setting(summary.samples)} of {setting(total)} samples" if total else seen


def _some(numbers: Sequence[int], limit: int = 5) -> str:
    return ", ".join(map(str, numbers[:limit])) + (", ..." if len(numbers) > limit else "")
