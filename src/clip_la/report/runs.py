"""One run's folder as values: its config and the lines of metrics.jsonl that still hold.

Evaluations that a watcher made beside the run (evals.jsonl) count like those made in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from clip_la.attention.spec import AttentionSpec
from clip_la.report.log import Log, RunError, read_log
from clip_la.report.points import (
    DiagnosticsPoint,
    EpochPoint,
    EvalPoint,
    RunEnd,
    TrainPoint,
    diagnostics_point,
    epoch_point,
    eval_point,
    train_point,
)
from clip_la.report.watched import watched_evals

__all__ = ["EvalPoint", "NotARunError", "Run", "RunError", "read_run", "read_runs", "read_usable_runs"]

METRICS_FILE = "metrics.jsonl"
CONFIG_FILES = ("config.yaml", "config.json")


class NotARunError(RunError):
    """A folder that is not a run's."""


@dataclass(frozen=True)
class Run:
    """A run folder, read.

    Attributes:
        name: the folder's name, made unique among the runs read together.
        config: the run config with nested keys joined by dots.
        start: the newest run_start line.
        failed_evals: evaluations that raised and were not made up for; they have no metrics.
        end: the run_end line of the newest session, or None if it has not ended (or was killed).
        samples: global samples seen, from the last line that holds.
        last_time: unix seconds of the last line.
        seconds: time from first to last line, added over sessions; undone work included.
        training_seconds: the part of it in which samples were seen (see `Log`), undone work included.
        undone_seconds: the undone work in that.
        num_resumes, num_restarts: sessions that continued, and that began again from nothing.
        num_undone_lines, num_torn_lines: lines left out.
        backward_lines: numbers of lines whose samples went back without a resume.
    """

    name: str
    path: Path
    config: Mapping[str, Any]
    start: Mapping[str, Any]
    attention: AttentionSpec
    train: tuple[TrainPoint, ...]
    epochs: tuple[EpochPoint, ...]
    evals: tuple[EvalPoint, ...]
    diagnostics: tuple[DiagnosticsPoint, ...]
    failed_evals: tuple[EvalPoint, ...]
    end: RunEnd | None
    samples: int
    last_time: float
    seconds: float
    training_seconds: float
    undone_seconds: float
    num_resumes: int
    num_restarts: int
    num_undone_lines: int
    num_torn_lines: int
    backward_lines: tuple[int, ...]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs to be compared, in the order given, each under a name of its own.

    Raises:
        RunError: no folder, the same folder twice, a folder that `read_run` refuses, or a run
            without one training line.
    """
    return [read_run(folder, name, must_have_trained=True) for folder, name in _named(folders)]


def read_usable_runs(folders: Sequence[Path]) -> tuple[list[Run], dict[str, str]]:
    """As `read_runs`, but runs that are empty or damaged are left out, as long as one is left.

    Returns:
        The runs, and what is wrong with the others: name -> problem.

    Raises:
        RunError: as `read_runs` where no run is left; NotARunError for a folder that is none, most likely
            a typing mistake.
    """
    runs, left_out = [], {}
    for folder, name in _named(folders):
        try:
            runs.append(read_run(folder, name, must_have_trained=True))
        except NotARunError:
            raise
        except RunError as error:
            left_out[name] = str(error)
    if not runs:
        raise RunError("\n".join(left_out.values()))
    return runs, left_out


def read_run(folder: Path, name: str | None = None, *, must_have_trained: bool = False) -> Run:
    """Read one run folder.

    Raises:
        RunError: the folder is not a run, its metrics are empty, a line is corrupt, or there is no
            training line where there must be one.
    """
    _refuse_non_run(folder)
    log = read_log(folder / METRICS_FILE)
    if log.start is None:
        raise RunError(f"{log.path}: is empty; the run has logged nothing yet, or its disk was full")
    if must_have_trained and not any(kind == "train" for kind, _, _ in log.points):
        raise RunError(f"{folder}: has started but logged no training line yet; wait, or leave it out")
    for line in watched_evals(folder, log.starts):
        log.points.setdefault((line["type"], line["name"], line["samples"]), line)
    points = sorted(log.points.values(), key=lambda line: int(line["samples"]))
    return Run(
        name=name or folder.resolve().name,
        path=folder,
        config=_read_config(folder),
        start=log.start,
        attention=_attention(log),
        train=tuple(train_point(line) for line in points if line["type"] == "train"),
        epochs=tuple(epoch_point(line) for line in points if line["type"] == "epoch"),
        evals=tuple(eval_point(line) for line in points if line["type"] == "eval"),
        diagnostics=tuple(diagnostics_point(line) for line in points if line["type"] == "diagnostics"),
        failed_evals=tuple(
            EvalPoint(int(line["samples"]), line["name"], {})
            for line in points
            if line["type"] == "eval_failed" and ("eval", line["name"], line["samples"]) not in log.points
        ),
        end=log.end,
        samples=max([int(log.start["samples"]), *(int(line["samples"]) for line in points)]),
        last_time=log.last_time,
        seconds=log.seconds,
        training_seconds=log.training_seconds,
        undone_seconds=log.undone_seconds,
        num_resumes=log.num_resumes,
        num_restarts=log.num_restarts,
        num_undone_lines=log.num_undone_lines,
        num_torn_lines=log.num_torn_lines,
        backward_lines=tuple(log.backward_lines),
    )


def _attention(log: Log) -> AttentionSpec:
    try:
        return AttentionSpec.from_config(log.start.get("attention") if log.start else None)
    except ValueError as error:
        raise RunError(f"{log.path}: run_start: {error}") from error


def _refuse_non_run(folder: Path) -> None:
    if not folder.exists():
        raise NotARunError(f"{folder}: no such folder; expected a run folder such as logs/my-run")
    if (folder / METRICS_FILE).is_file():
        return
    inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS_FILE}"))
    hint = f"; it contains the runs {', '.join(inside[:8])}: name those" if inside else ""
    raise NotARunError(f"{folder}: is not a run folder (it has no {METRICS_FILE}){hint}")


def _read_config(folder: Path) -> dict[str, Any]:
    for name in CONFIG_FILES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML too
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise RunError(f"{path}: cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise RunError(f"{path}: holds a {type(config).__name__}; expected keys and values")
        return dict(_flatten(config))
    raise NotARunError(f"{folder}: is not a run folder (it has none of {', '.join(CONFIG_FILES)})")


def _flatten(config: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _named(folders: Sequence[Path]) -> list[tuple[Path, str]]:
    """Each folder with its name, led by as many parents as tell all of them apart."""
    if not folders:
        raise RunError("no run folder given; name at least one, such as logs/my-run")
    return list(zip(folders, _unique_names([folder.resolve() for folder in folders]), strict=True))


def _unique_names(folders: Sequence[Path]) -> list[str]:
    twice = sorted({str(folder) for folder in folders if folders.count(folder) > 1})
    if twice:
        raise RunError(f"given more than once: {', '.join(twice)}; name each run once")
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    return ["/".join(folder.parts[-depth:]) for folder in folders]
