"""What a reader must know before believing a comparison of runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from clip_la.report.differences import (
    DATA_KEYS,
    EVALUATION_KEYS,
    EXPECTED_KEYS,
    HOUSEKEEPING_KEYS,
    ConfigDifference,
    fingerprint,
    groups,
    odd_ones,
)
from clip_la.report.kinds import Kind
from clip_la.report.runs import EvalPoint, Run
from clip_la.report.summary import RunSummary, Validation, ZeroShot, smooth_losses
from clip_la.report.text import duration, evaluation, percent, setting

Severity: TypeAlias = Literal["warning", "note"]
Problem: TypeAlias = tuple[str, str]
"""A topic, and what is said of the run, without its name and the full stop."""

HIGH_DATA_WAIT = 0.2
_SAME_SIZE = 0.01
_TRAINING_ROSE = 1.25
_VALIDATION_ROSE = 1.1
_SLOWED = 0.7
_MAX_LOGIT_SCALE = 99.99


@dataclass(frozen=True)
class Finding:
    """Something the reader must know before believing a comparison.

    A "warning" makes the numbers wrong or not comparable; a "note" is only good to know. `topic` says in a
    word or two what it is about.
    """

    severity: Severity
    topic: str
    message: str
    runs: tuple[str, ...]


def find_problems(
    runs: Sequence[Run],
    summaries: Sequence[RunSummary],
    config: ConfigDifference,
    kinds: Sequence[Kind],
    left_out: Mapping[str, str],
) -> tuple[Finding, ...]:
    """Warnings first, and of them: what is missing, what differs at the root, what is wrong with a run."""
    findings = [
        Finding("warning", "left out", f"{name} is not in this report: {problem}", (name,))
        for name, problem in left_out.items()
    ]
    findings += _core_differences(runs, summaries, config)
    for run, summary in zip(runs, summaries, strict=True):
        findings += _within(run, summary)
    findings += _missing_evaluations(runs)
    findings += _seeds(kinds)
    findings += _other_settings(config)
    findings += _sizes(summaries)
    findings += _machines(runs)
    findings.sort(key=lambda finding: finding.severity, reverse=True)  # warnings first, else in order
    return tuple(findings)


def _core_differences(
    runs: Sequence[Run], summaries: Sequence[RunSummary], config: ConfigDifference
) -> list[Finding]:
    """Where it was not the same experiment."""
    facts: list[tuple[str, str, dict[str, Any]]] = [
        ("batch size", "the global batch size", {s.name: s.global_batch_size for s in summaries}),
        ("samples", "the planned number of samples", {s.name: s.samples_total for s in summaries}),
        ("samples", "the number of samples seen", {s.name: s.samples for s in summaries}),
        *(("data", f"the data ({key})", config.differs.get(key, {})) for key in DATA_KEYS),
        *(("evaluation", what, values) for what, values in _evaluation_facts(runs).items()),
    ]
    return [
        Finding("warning", topic, f"The runs differ in {what}: {groups(values)}.", odd_ones(values))
        for topic, what, values in facts
        if len({fingerprint(value) for value in values.values()}) > 1
    ]


def _evaluation_facts(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """What the last evaluations of one name were taken over; metrics compare only where it is equal."""
    facts: dict[str, dict[str, Any]] = {}
    for run in runs:
        for name, point in _last_evals(run).items():
            for key in EVALUATION_KEYS:
                if key in point.metrics:
                    facts.setdefault(f"{key} of {evaluation(name)}", {})[run.name] = point.metrics[key]
    return facts


def _last_evals(run: Run) -> dict[str, EvalPoint]:
    return {point.name: point for point in run.evals}  # in order of samples, so the last one stays


def _missing_evaluations(runs: Sequence[Run]) -> Iterator[Finding]:
    names = dict.fromkeys(point.name for run in runs for point in run.evals)
    for name in names:
        without = tuple(run.name for run in runs if name not in _last_evals(run))
        if without:
            message = f"{evaluation(name)} was never evaluated in {', '.join(without)}."
            yield Finding("warning", "evaluation", message, without)


def _seeds(kinds: Sequence[Kind]) -> Iterator[Finding]:
    for kind in kinds:
        if kind.repeats:
            message = (
                f"{', '.join(kind.repeats)} repeat(s) the config and seed of another run of {kind.label}: "
                "no further seed, and in no paired difference."
            )
            yield Finding("note", "seed", message, kind.repeats)
    if len(kinds) < 2:
        return
    of_kinds = {kind.label: sorted(map(str, kind.runs)) for kind in kinds}
    if len(set(map(tuple, of_kinds.values()))) > 1:
        seeds = "; ".join(f"{label}: {', '.join(seeds)}" for label, seeds in of_kinds.items())
        message = f"The kinds differ in the seed ({seeds}): only seeds that both have can be compared."
        yield Finding("warning", "seed", message, ())
    elif len(kinds[0].runs) == 1:
        message = "There is one seed a kind: how much of a difference is luck can't be known from these runs."
        yield Finding("note", "seed", message, ())


def _other_settings(config: ConfigDifference) -> Iterator[Finding]:
    explained = {"seed", "batch_size", "accum_freq", "epochs", *EXPECTED_KEYS, *DATA_KEYS, *HOUSEKEEPING_KEYS}
    for key, values in config.differs.items():
        if key.split(".")[0] not in explained:
            severity: Severity = "note" if key.startswith("versions.") else "warning"
            topic = "versions" if severity == "note" else "setting"
            yield Finding(severity, topic, f"The runs differ in {key}: {groups(values)}.", odd_ones(values))


def _sizes(summaries: Sequence[RunSummary]) -> Iterator[Finding]:
    sizes = {s.name: s.num_parameters for s in summaries if s.num_parameters}
    if sizes and max(sizes.values()) > min(sizes.values()) * (1 + _SAME_SIZE):
        yield Finding("note", "size", f"The models differ in size: {groups(sizes)} parameters.", tuple(sizes))


def _machines(runs: Sequence[Run]) -> Iterator[Finding]:
    for key, what in (("device", "the device"), ("world_size", "the number of processes")):
        values = {run.name: run.start[key] for run in runs if key in run.start}
        if len({fingerprint(value) for value in values.values()}) > 1:
            message = f"The runs differ in {what}: {groups(values)}; hours and samples/s don't compare."
            yield Finding("note", "speed", message, tuple(values))


def _within(run: Run, summary: RunSummary) -> list[Finding]:
    """Findings about one run alone."""
    warnings = [
        *_training_problems(run, summary),
        *_folder_problems(run),
        *_evaluation_problems(run, summary),
    ]
    return [
        *(Finding("warning", topic, f"{run.name}: {text}.", (run.name,)) for topic, text in warnings),
        *(Finding("note", topic, f"{run.name}: {text}.", (run.name,)) for topic, text in _remarks(run)),
    ]


def _training_problems(run: Run, summary: RunSummary) -> Iterator[Problem]:
    if summary.num_non_finite:
        yield "not finite", f"its loss was not finite in {summary.num_non_finite} log interval(s)"
    if summary.skipped_steps:
        yield "skipped steps", f"skipped {summary.skipped_steps} step(s) that were not finite"
    if summary.lost_samples:
        yield "lost samples", _lost(summary)
    if summary.state == "running":
        yield "still running", f"is still running: {_progress(summary)}"
    elif summary.state != "finished":
        yield "stopped early", f"is not finished: {summary.state}, {_progress(summary)}"
    elif summary.samples < (summary.samples_total or 0):
        yield "stopped early", f"says it is finished, but saw only {_progress(summary)}"
    yield from _learning_problems(run, summary)
    if summary.data_wait > HIGH_DATA_WAIT:
        share = percent(summary.data_wait, 0)
        yield "data wait", f"waited for data {share} of the time, so its speed is the loader's"


def _learning_problems(run: Run, summary: RunSummary) -> Iterator[Problem]:
    # A softmax contrastive loss over a batch of B starts at about ln B, the loss of guessing.
    batch = 0 if run.config.get("siglip") else summary.global_batch_size or 0
    if batch > 1 and summary.train_loss >= math.log(batch):
        guessing = f"ln {batch} = {math.log(batch):.3f}"
        yield "not learning", f"its training loss {summary.train_loss:.3f} is not below guessing ({guessing})"
    smooth = smooth_losses(run.train)
    finite = [value for value in smooth if math.isfinite(value)]
    if finite and min(finite) * _TRAINING_ROSE < summary.train_loss:
        lowest = min(finite)
        samples = max(p.samples for p, value in zip(run.train, smooth, strict=True) if value == lowest)
        yield (
            "loss rose",
            (
                f"its smoothed training loss rose again, from {lowest:.3f} at {setting(samples)} samples "
                f"to {summary.train_loss:.3f}"
            ),
        )


def _folder_problems(run: Run) -> Iterator[Problem]:
    if run.num_restarts:
        yield "restarted", f"was begun again from nothing {run.num_restarts} time(s) in its folder"
    if run.backward_lines:
        lines = _some(run.backward_lines)
        yield (
            "two writers",
            (
                f"its metrics go back in samples at line(s) {lines} without a resume; "
                "did two jobs write into one folder?"
            ),
        )


def _evaluation_problems(run: Run, summary: RunSummary) -> Iterator[Problem]:
    for point in run.failed_evals:
        samples = setting(point.samples)
        yield "evaluation", f"{evaluation(point.name)} failed at {samples} samples; out.log says why"
    for name, point in _last_evals(run).items():
        for key, what in (("num_unreadable", "image(s)"), ("num_unusable", "pair(s)")):
            if point.metrics.get(key):
                number = point.metrics[key]
                yield (
                    "evaluation",
                    f"{number} {what} of {evaluation(name)} could not be read and don't count",
                )
    for value in summary.validation:
        yield from _validation_problems(value)
    for result in summary.zeroshot:
        yield from _zeroshot_problems(result)
    for name, point in _last_evals(run).items():
        if point.samples < summary.samples and summary.state != "running":
            at = f"{setting(point.samples)} of its {setting(summary.samples)} samples"
            yield "evaluation", f"was last evaluated on {evaluation(name)} at {at}"


def _validation_problems(value: Validation) -> Iterator[Problem]:
    if math.isnan(value.last):
        yield "not finite", f"its loss on {evaluation(value.name)} is not a number"
    elif value.best * _VALIDATION_ROSE < value.last:
        yield (
            "loss rose",
            (
                f"its loss on {evaluation(value.name)} rose again, from {value.best:.3f} at "
                f"{setting(value.best_samples)} samples to {value.last:.3f}"
            ),
        )


def _zeroshot_problems(result: ZeroShot) -> Iterator[Problem]:
    name = evaluation(result.name)
    low = result.top1 if result.top1_low is None else result.top1_low
    if math.isnan(result.top1):
        yield "not finite", f"its top-1 on {name} is not a number"
    elif result.chance is not None and low <= result.chance:
        levels = f"{percent(result.top1)} against {percent(result.chance, 2)}"
        yield "not learning", f"its top-1 on {name} can't be told from chance: {levels}"


def _remarks(run: Run) -> Iterator[Problem]:
    if run.num_resumes:
        undone = f"{run.num_undone_lines} line(s)"
        if run.undone_seconds:
            undone += f" and {duration(run.undone_seconds)} of training"
        yield "resumed", f"was resumed {run.num_resumes} time(s); {undone} were undone and are left out"
    if run.num_torn_lines:
        yield "torn lines", f"{run.num_torn_lines} torn line(s) of its metrics are left out"
    rates = [p.samples_per_second for p in run.train if math.isfinite(p.samples_per_second)]
    late = rates[-max(1, len(rates) // 4) :]
    if len(rates) >= 8 and statistics.median(late) < _SLOWED * statistics.median(rates):
        yield (
            "slowed down",
            (
                f"slowed down: {statistics.median(late):.0f} samples/s in its last quarter, "
                f"{statistics.median(rates):.0f} over all"
            ),
        )
    if run.train and run.train[-1].logit_scale >= _MAX_LOGIT_SCALE:
        yield "logit scale", "its logit scale is at its limit of 100"


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
