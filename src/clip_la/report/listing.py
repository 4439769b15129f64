"""The runs of a logs folder at a glance: state, progress and last metrics."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clip_la.report.runs import METRICS_FILE, RunError, read_run
from clip_la.report.summary import RunSummary, summarise
from clip_la.report.tables import accuracy, text_table
from clip_la.report.text import EMPTY, count, evaluation, number, percent


@dataclass(frozen=True)
class ListedRun:
    """A run folder; `summary` is None, and `problem` says why, where it could not be read."""

    path: Path
    summary: RunSummary | None
    problem: str | None


def list_runs(logs_dir: Path, now: float | None = None) -> list[ListedRun]:
    """Every run folder directly in `logs_dir`, by name; a broken one is listed with its problem.

    Raises:
        RunError: `logs_dir` doesn't exist or holds no run.
    """
    if not logs_dir.is_dir():
        raise RunError(f"{logs_dir}: no such folder; expected the folder of all runs, such as logs")
    folders = sorted(path.parent for path in logs_dir.glob(f"*/{METRICS_FILE}"))
    if not folders:
        raise RunError(f"{logs_dir}: holds no run (no folder in it has a {METRICS_FILE})")
    moment = time.time() if now is None else now
    return [_listed(folder, moment) for folder in folders]


def listing_text(listed: Sequence[ListedRun]) -> str:
    """The list as an aligned table; problems of unreadable runs below it."""
    headers = ["Run", "State", "Progress", "Attention", "Training loss", "Top-1", "Samples/s"]
    problems = [f"{run.path.name}: {run.problem}" for run in listed if run.problem]
    return "\n".join([text_table(headers, [_row(run) for run in listed]), *problems])


def _listed(folder: Path, now: float) -> ListedRun:
    try:
        return ListedRun(folder, summarise(read_run(folder), now), None)
    except RunError as error:
        return ListedRun(folder, None, str(error))


def _row(run: ListedRun) -> list[str]:
    summary = run.summary
    if summary is None:
        return [run.path.name, "unreadable", *[EMPTY] * 5]
    total = summary.samples_total
    progress = f"{percent(summary.samples / total, 0)} of {count(total)}" if total else count(summary.samples)
    top1 = "; ".join(f"{evaluation(result.name)} {accuracy(result)}" for result in summary.zeroshot) or EMPTY
    speed = count(summary.samples_per_second) if summary.samples_per_second > 0 else EMPTY
    return [summary.name, summary.state, progress, summary.attention, number(summary.train_loss), top1, speed]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `clip-la runs`."""
    parser.add_argument("logs", type=Path, nargs="?", default=Path("logs"), help="default: logs")


def run(args: argparse.Namespace) -> int:
    """`clip-la runs`; returns its exit code."""
    print(listing_text(list_runs(args.logs)))
    return 0
