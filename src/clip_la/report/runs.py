"""One run's folder as values: its config and the lines of metrics.jsonl that still hold.

A resumed run continues from a checkpoint, so what it had logged past that checkpoint was undone and
is logged again; those lines are left out here. A kill can tear the line being written; such a line is
left out too. Anything else that cannot be read is an error that names the line. Evaluations that a watcher
made beside the run (evals.jsonl) count like those made in training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from clip_la.attention.spec import AttentionSpec
from clip_la.report.watched import Start, watched_evals

METRICS_FILE = "metrics.jsonl"
CONFIG_FILES = ("config.yaml", "config.json")


class RunError(ValueError):
    """A folder that is not a run, or a run whose files cannot be read."""


@dataclass(frozen=True)
class TrainPoint:
    """One log interval. `loss` is its mean; NaN where it was not finite or a field was not logged.

    `grad_norm_image` and `grad_norm_text` are logged by runs with diagnostics.
    """

    samples: int
    loss: float
    samples_per_second: float
    data_wait: float
    skipped_steps: int
    lost_samples: int
    logit_scale: float = math.nan
    grad_norm_image: float = math.nan
    grad_norm_text: float = math.nan


@dataclass(frozen=True)
class EpochPoint:
    """One virtual epoch: its mean loss, and the samples lost by cause since the run began."""

    samples: int
    epoch: int
    loss: float
    losses: Mapping[str, int]


@dataclass(frozen=True)
class EvalPoint:
    """One evaluation: the evaluator's name and its metrics."""

    samples: int
    name: str
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class DiagnosticsPoint:
    """The attention layers measured once: "TOWER/LAYER/FIGURE" -> value, NaN where it was not finite."""

    samples: int
    layers: Mapping[str, float]


@dataclass(frozen=True)
class RunEnd:
    samples: int
    reason: str


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
    if not folders:
        raise RunError("no run folder given; name at least one, such as logs/my-run")
    names = _unique_names([folder.resolve() for folder in folders])
    runs = [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    for run in runs:
        if not run.train:
            raise RunError(f"{run.path}: has started but logged no training line yet; wait, or leave it out")
    return runs


def read_run(folder: Path, name: str | None = None) -> Run:
    """Read one run folder.

    Raises:
        RunError: the folder is not a run, its metrics are empty, or a line is corrupt.
    """
    _refuse_non_run(folder)
    log = _Log(folder / METRICS_FILE)
    for number, line in _lines(log):
        log.add(number, line)
    if log.start is None:
        raise RunError(f"{log.path}: is empty; the run has logged nothing yet, or its disk was full")
    for line in watched_evals(folder, log.starts):
        log.points.setdefault((line["type"], line["name"], line["samples"]), line)
    points = sorted(log.points.values(), key=lambda line: int(line["samples"]))
    return Run(
        name=name or folder.resolve().name,
        path=folder,
        config=_read_config(folder),
        start=log.start,
        attention=_attention(log),
        train=tuple(_train_point(line) for line in points if line["type"] == "train"),
        epochs=tuple(_epoch_point(line) for line in points if line["type"] == "epoch"),
        evals=tuple(_eval_point(line) for line in points if line["type"] == "eval"),
        diagnostics=tuple(_diagnostics_point(line) for line in points if line["type"] == "diagnostics"),
        failed_evals=tuple(
            EvalPoint(int(line["samples"]), line["name"], {})
            for line in points
            if line["type"] == "eval_failed" and ("eval", line["name"], line["samples"]) not in log.points
        ),
        end=log.end,
        samples=max([int(log.start["samples"]), *(int(line["samples"]) for line in points)]),
        last_time=log.last_time,
        seconds=log.seconds,
        num_resumes=log.num_resumes,
        num_restarts=log.num_restarts,
        num_undone_lines=log.num_undone_lines,
        num_torn_lines=log.num_torn_lines,
        backward_lines=tuple(log.backward_lines),
    )


@dataclass
class _Log:
    """The lines that hold so far, while a metrics.jsonl is read from top to bottom."""

    path: Path
    start: dict[str, Any] | None = None
    starts: list[Start] = field(default_factory=list)
    end: RunEnd | None = None
    points: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)
    last_samples: int = 0
    last_time: float = 0.0
    seconds: float = 0.0
    num_resumes: int = 0
    num_restarts: int = 0
    num_undone_lines: int = 0
    num_torn_lines: int = 0
    backward_lines: list[int] = field(default_factory=list)

    def add(self, number: int, line: dict[str, Any]) -> None:
        kind, samples = line["type"], int(line["samples"])
        if kind == "run_start":
            self._begin(line)
        elif self.start is None:
            raise self.error(number, f"is {kind!r}; expected a run_start line first")
        else:
            self.seconds += max(0.0, line["time"] - self.last_time)
            if samples < self.last_samples:
                self.backward_lines.append(number)
        if kind == "run_end":
            self.end = RunEnd(samples, str(line.get("reason", "no reason given")))
        elif kind in _CHECKS:
            self._check(number, line)
            # An evaluation repeated at the samples of a resume replaces the first one.
            self.points[kind, str(line.get("name", "")), samples] = line
        self.last_samples, self.last_time = samples, line["time"]

    def _begin(self, line: dict[str, Any]) -> None:
        kept = {}
        if line.get("resumed"):
            kept = {key: point for key, point in self.points.items() if point["samples"] <= line["samples"]}
            self.num_resumes += 1
        elif self.start is not None:
            self.num_restarts += 1
        self.num_undone_lines += len(self.points) - len(kept)
        self.points, self.start, self.end = kept, line, None
        self.starts.append(Start(line["time"], int(line["samples"]) if line.get("resumed") else 0))

    def _check(self, number: int, line: dict[str, Any]) -> None:
        for key, types in _CHECKS[line["type"]].items():
            if key not in line:
                raise self.error(number, f"({line['type']}) has no {key!r}")
            if not isinstance(line[key], types):
                raise self.error(number, f"({line['type']}) has {key!r} = {line[key]!r}")

    def error(self, number: int, problem: str) -> RunError:
        return RunError(f"{self.path}: line {number} {problem}")


_NUMBER = (int, float)
_CHECKS: dict[str, dict[str, tuple[type, ...]]] = {
    "train": {"loss": (*_NUMBER, type(None))},
    "epoch": {"epoch": (int,), "loss": (*_NUMBER, type(None))},
    "eval": {"name": (str,), "metrics": (dict,)},
    "eval_failed": {"name": (str,)},
    "diagnostics": {"layers": (dict,)},
}


def _lines(log: _Log) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, line) for each whole line; a torn one is only allowed where a process can have died."""
    raw = log.path.read_bytes().split(b"\n")
    lines = [(number, text) for number, text in enumerate(raw, start=1) if text.strip()]
    for position, (number, text) in enumerate(lines):
        try:
            line = json.loads(text)
        except ValueError as error:
            if not _may_be_torn(lines, position):
                raise log.error(number, f"is not JSON ({error}); repair or delete that line") from error
            log.num_torn_lines += 1
            continue
        if not _is_line(line):
            raise log.error(number, "has no type (text), samples and time (numbers); repair or delete it")
        yield number, line


def _may_be_torn(lines: Sequence[tuple[int, bytes]], position: int) -> bool:
    """Only the last line of a session: nothing follows it, or the next session's run_start does."""
    following = lines[position + 1 : position + 2]
    return not following or b'"run_start"' in following[0][1]


def _is_line(line: object) -> bool:
    return (
        isinstance(line, dict)
        and isinstance(line.get("type"), str)
        and all(
            isinstance(line.get(key), _NUMBER) and math.isfinite(line[key]) for key in ("samples", "time")
        )
    )


def _train_point(line: Mapping[str, Any]) -> TrainPoint:
    return TrainPoint(
        samples=int(line["samples"]),
        loss=_float(line["loss"]),
        samples_per_second=_float(line.get("samples_per_second")),
        data_wait=_float(line.get("data_wait")),
        skipped_steps=int(line.get("skipped_steps") or 0),
        lost_samples=int(line.get("lost_samples") or 0),
        logit_scale=_float(line.get("logit_scale")),
        grad_norm_image=_float(line.get("grad_norm_image")),
        grad_norm_text=_float(line.get("grad_norm_text")),
    )


def _epoch_point(line: Mapping[str, Any]) -> EpochPoint:
    losses = {str(cause): int(count) for cause, count in (line.get("losses") or {}).items()}
    return EpochPoint(int(line["samples"]), line["epoch"], _float(line["loss"]), losses)


def _eval_point(line: Mapping[str, Any]) -> EvalPoint:
    return EvalPoint(int(line["samples"]), line["name"], line["metrics"])


def _diagnostics_point(line: Mapping[str, Any]) -> DiagnosticsPoint:
    return DiagnosticsPoint(int(line["samples"]), {key: _float(v) for key, v in line["layers"].items()})


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)


def _attention(log: _Log) -> AttentionSpec:
    try:
        return AttentionSpec.from_config(log.start.get("attention") if log.start else None)
    except ValueError as error:
        raise RunError(f"{log.path}: run_start: {error}") from error


def _refuse_non_run(folder: Path) -> None:
    if not folder.exists():
        raise RunError(f"{folder}: no such folder; expected a run folder such as logs/my-run")
    if (folder / METRICS_FILE).is_file():
        return
    inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS_FILE}"))
    hint = f"; it contains the runs {', '.join(inside[:8])}: name those" if inside else ""
    raise RunError(f"{folder}: is not a run folder (it has no {METRICS_FILE}){hint}")


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
    raise RunError(f"{folder}: is not a run folder (it has none of {', '.join(CONFIG_FILES)})")


def _flatten(config: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _unique_names(folders: Sequence[Path]) -> list[str]:
    """Each folder's name, led by as many parents as tell all of them apart."""
    twice = sorted({str(folder) for folder in folders if folders.count(folder) > 1})
    if twice:
        raise RunError(f"given more than once: {', '.join(twice)}; name each run once")
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    return ["/".join(folder.parts[-depth:]) for folder in folders]
