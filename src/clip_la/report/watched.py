"""What `clip-la watch` found beside a training run: the lines of its evals.jsonl that still hold."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

EVALS_FILE = "evals.jsonl"
_KEYS: dict[str, type | tuple[type, ...]] = {"type": str, "name": str, "samples": int, "time": (int, float)}


class Start(NamedTuple):
    """A session of the trainer: when it began, and the samples that it continued from (0: from nothing)."""

    time: float
    samples: int


def watched_evals(run_folder: Path, starts: Sequence[Start]) -> list[dict[str, Any]]:
    """`eval` and `eval_failed` lines, as those of metrics.jsonl; none where nobody watches.

    Lines about weights that a later session of the trainer undid are left out, and lines torn by a kill.
    """
    return [
        line
        for line in read_evals(run_folder)
        if all(start.samples >= line["samples"] for start in starts if start.time > line["time"])
    ]


def read_evals(run_folder: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a run's evals.jsonl."""
    file = run_folder / EVALS_FILE
    for text in file.read_bytes().splitlines() if file.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:  # torn by a kill
            continue
        if isinstance(line, dict) and all(isinstance(line.get(key), types) for key, types in _KEYS.items()):
            yield {"metrics": {}, **line}
