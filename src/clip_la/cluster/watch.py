"""Evaluate the checkpoints of a training run as they appear, off the training nodes."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clip_la.checkpoint import CheckpointError, load_bundle
from clip_la.checkpoint_files import list_checkpoints, samples_of
from clip_la.distributed import World, init_world
from clip_la.evaluate.command import EvalOptions, add_data_arguments, format_evaluation, run_evaluation
from clip_la.peers import shared_fate
from clip_la.report.watched import EVALS_FILE, read_evals

logger = logging.getLogger(__name__)

Evaluate = Callable[[Path], dict[str, Any]]


def watch(
    run_folder: Path,
    name: str,
    evaluate: Evaluate,
    world: World,
    *,
    poll_seconds: float = 60,
    patience_hours: float = 24,
) -> int:
    """Evaluate each kept checkpoint once, oldest first, until the run has ended.

    Results are appended to the run's `evals.jsonl`, one line an evaluation: what is there already is
    left out, so a watcher that was stopped goes on when started again.

    Args:
        run_folder: may still be empty.
        name: of the evaluation, such as "zeroshot/imagenet"; several may watch one run.
        evaluate: checkpoint -> metrics; called on all ranks.
        world: rank 0 looks for files and writes.
        poll_seconds: between looks.
        patience_hours: after so long without a line from the trainer nobody trains any more.

    Returns:
        How many were evaluated.
    """
    num_done = 0
    while True:
        # Asked before the listing: a run that has ended adds no file after it.
        found = (has_ended(run_folder, patience_hours), _next(run_folder, name)) if world.is_main else None
        ended, path = world.broadcast(found)
        if path is not None:
            _evaluate_one(run_folder, name, path, evaluate, world)
            num_done += 1
        elif ended:
            return num_done
        else:
            time.sleep(poll_seconds)


def has_ended(run_folder: Path, patience_hours: float) -> bool:
    """Whether the trainer's last word is that the run is complete, or lies too long ago."""
    file = run_folder / "metrics.jsonl"
    if not file.exists():
        return False
    hours = (time.time() - file.stat().st_mtime) / 3600
    if hours > patience_hours:
        logger.warning("%s has been silent for %.1f hours; watch it again when it goes on", run_folder, hours)
        return True
    last = _last_line(file)
    return last.get("type") == "run_end" and last.get("reason") in ("finished", "non_finite")


def _last_line(file: Path) -> dict[str, Any]:
    try:
        last: dict[str, Any] = json.loads(file.read_bytes().splitlines()[-1])
    except (IndexError, ValueError):  # empty, or being written
        return {}
    return last


def _next(run_folder: Path, name: str) -> Path | None:
    done = {line.get("checkpoint") for line in read_evals(run_folder) if line["name"] == name}
    for path in reversed(list_checkpoints(run_folder / "checkpoints")):
        if path.name.startswith("epoch_") and path.name not in done:
            return path
    return None


def _evaluate_one(run_folder: Path, name: str, path: Path, evaluate: Evaluate, world: World) -> None:
    line: dict[str, Any] = {"type": "eval", "samples": samples_of(path), "name": name}
    try:
        line["metrics"] = evaluate(path)
    except CheckpointError as error:  # removed meanwhile, or damaged: the next one may be fine
        logger.warning("%s", error)
        line.update(type="eval_failed", error=str(error))
    if world.is_main:
        # The line break comes first too: what a kill has left of a line before it stays a line of its own.
        with (run_folder / EVALS_FILE).open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps({**line, "checkpoint": path.name, "time": time.time()}) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command: those of `watch`, and what to evaluate."""
    add = parser.add_argument
    add("run_folder", type=Path, metavar="RUN", help="the run's folder; results go to its evals.jsonl")
    add("--poll-seconds", type=float, default=60, help="between looks for files (default: %(default)s)")
    add(
        "--patience-hours",
        type=float,
        default=24,
        help="end after so long without a line from the trainer (default: %(default)s)",
    )
    add("--precision", default=None, help="default: the one it was trained in")
    add("--device", default="auto", help="auto, cuda or cpu (default: %(default)s)")
    add_data_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    options = EvalOptions.from_args(args)
    world = init_world(args.device)

    def evaluate(path: Path) -> dict[str, Any]:
        """Evaluate one checkpoint, and print it on the main rank."""
        bundle = load_bundle(path, precision=args.precision, device=world.device)
        report = run_evaluation(bundle, options, str(path))
        if world.is_main:
            print(format_evaluation(report), flush=True)
        metrics: dict[str, Any] = report["metrics"]
        return metrics

    with shared_fate(world):
        num_evaluated = watch(
            args.run_folder,
            options.name,
            evaluate,
            world,
            poll_seconds=args.poll_seconds,
            patience_hours=args.patience_hours,
        )
        if world.is_main:
            print(f"{num_evaluated} checkpoint(s) evaluated")
    return 0
