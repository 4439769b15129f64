"""Evaluate the checkpoints of a training run as they appear, off the training nodes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clip_la import checkpoint
from clip_la.distributed import World

logger = logging.getLogger(__name__)

RESULTS_FILE = "evals.jsonl"
Evaluate = Callable[[Path], dict[str, Any]]


def watch(run_folder: Path, evaluate: Evaluate, world: World, *, poll_seconds: float = 60) -> int:
    """Evaluate each kept checkpoint once, oldest first, until the run has finished.

    Results are appended to the run's `evals.jsonl`, one line an evaluation: what is there already is
    left out, so a watcher that was stopped goes on when started again.

    Args:
        run_folder: may still be empty.
        evaluate: checkpoint -> {"name", "metrics", ...}; called on all ranks.
        world: rank 0 looks for files and writes.
        poll_seconds: between looks.

    Returns:
        How many were evaluated.
    """
    num_done = 0
    while True:
        # Asked before the listing: a run that has ended adds no file after it.
        found = (has_finished(run_folder), _next(run_folder)) if world.is_main else None
        finished, path = world.broadcast(found)
        if path is not None:
            _evaluate_one(run_folder, path, evaluate, world)
            num_done += 1
        elif finished:
            return num_done
        else:
            time.sleep(poll_seconds)


def has_finished(run_folder: Path) -> bool:
    """Whether the trainer's last word is that the run is complete."""
    file = run_folder / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    try:
        last = json.loads(lines[-1]) if lines else {}
    except ValueError:  # being written
        return False
    return last.get("type") == "run_end" and last.get("reason") in ("finished", "non_finite")


def _next(run_folder: Path) -> Path | None:
    file = run_folder / RESULTS_FILE
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    done = {json.loads(line)["checkpoint"] for line in lines}
    for path in reversed(checkpoint.list_checkpoints(run_folder / "checkpoints")):
        if path.name.startswith("epoch_") and path.name not in done:
            return path
    return None


def _evaluate_one(run_folder: Path, path: Path, evaluate: Evaluate, world: World) -> None:
    line: dict[str, Any] = {"type": "eval", "samples": checkpoint.samples_of(path), "checkpoint": path.name}
    try:
        line.update(evaluate(path))
    except checkpoint.CheckpointError as error:  # removed meanwhile, or damaged: the next one may be fine
        logger.warning("%s", error)
        line.update(type="eval_failed", error=str(error))
    if world.is_main:
        with (run_folder / RESULTS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "time": time.time()}) + "\n")
