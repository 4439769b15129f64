"""The lines of a run's metrics.jsonl that still hold.

A resumed run continues from a checkpoint, so what it had logged past that checkpoint was undone and
is logged again; those lines are left out here. A kill can tear the line being written; such a line is
left out too. Anything else that cannot be read is an error that names the line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clip_la.report.points import RunEnd
from clip_la.report.watched import Start


class RunError(ValueError):
    """A folder that is not a run, or a run whose files cannot be read."""


@dataclass
class Log:
    """The lines that hold so far, while a metrics.jsonl is read from top to bottom.

    Attributes:
        points: (type, name, samples) -> line, with `training_seconds` as it was then.
        seconds: time from the first to the last line of each session, added up.
        training_seconds: the part of it in which samples were seen: without the gaps between sessions,
            and without evaluating and saving between two lines at the same samples.
        undone_seconds: the part of that whose work a later session began again.
    """

    path: Path
    start: dict[str, Any] | None = None
    starts: list[Start] = field(default_factory=list)
    end: RunEnd | None = None
    points: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)
    last_samples: int = 0
    last_time: float = 0.0
    seconds: float = 0.0
    training_seconds: float = 0.0
    undone_seconds: float = 0.0
    num_resumes: int = 0
    num_restarts: int = 0
    num_undone_lines: int = 0
    num_torn_lines: int = 0
    backward_lines: list[int] = field(default_factory=list)

    def add(self, number: int, line: dict[str, Any]) -> None:
        """Take in the next line.

        Raises:
            RunError: it lacks what lines of its type have.
        """
        kind, samples = line["type"], int(line["samples"])
        if kind == "run_start":
            self._begin(line)
        elif self.start is None:
            raise self.error(number, f"is {kind!r}; expected a run_start line first")
        else:
            self._pass_time(number, samples, max(0.0, line["time"] - self.last_time))
        if kind == "run_end":
            self.end = RunEnd(samples, str(line.get("reason", "no reason given")))
        elif kind in _CHECKS:
            self._check(number, line)
            # An evaluation repeated at the samples of a resume replaces the first one.
            point = {**line, "training_seconds": self.training_seconds}
            self.points[kind, str(line.get("name", "")), samples] = point
        self.last_samples, self.last_time = samples, line["time"]

    def _pass_time(self, number: int, samples: int, elapsed: float) -> None:
        self.seconds += elapsed
        if samples > self.last_samples:
            self.training_seconds += elapsed
        elif samples < self.last_samples:
            self.backward_lines.append(number)

    def _begin(self, line: dict[str, Any]) -> None:
        kept = {}
        if line.get("resumed"):
            kept = {key: point for key, point in self.points.items() if point["samples"] <= line["samples"]}
            self.num_resumes += 1
        elif self.start is not None:
            self.num_restarts += 1
        self.num_undone_lines += len(self.points) - len(kept)
        if len(kept) < len(self.points):
            done = max((point["training_seconds"] for point in kept.values()), default=0.0)
            self.undone_seconds += self.training_seconds - done
        self.points, self.start, self.end = kept, line, None
        self.starts.append(Start(line["time"], int(line["samples"]) if line.get("resumed") else 0))

    def _check(self, number: int, line: dict[str, Any]) -> None:
        for key, types in _CHECKS[line["type"]].items():
            if key not in line:
                raise self.error(number, f"({line['type']}) has no {key!r}")
            if not isinstance(line[key], types):
                raise self.error(number, f"({line['type']}) has {key!r} = {line[key]!r}")

    def error(self, number: int, problem: str) -> RunError:
        """The error that names a line."""
        return RunError(f"{self.path}: line {number} {problem}")


def read_log(path: Path) -> Log:
    """Read a metrics.jsonl; `start` is None where nothing was logged.

    Raises:
        RunError: a line is corrupt.
    """
    log = Log(path)
    for number, line in _lines(log):
        log.add(number, line)
    return log


_NUMBER = (int, float)
_CHECKS: dict[str, dict[str, tuple[type, ...]]] = {
    "train": {"loss": (*_NUMBER, type(None))},
    "epoch": {"epoch": (int,), "loss": (*_NUMBER, type(None))},
    "eval": {"name": (str,), "metrics": (dict,)},
    "eval_failed": {"name": (str,)},
    "diagnostics": {"layers": (dict,)},
}


def _lines(log: Log) -> Iterator[tuple[int, dict[str, Any]]]:
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
