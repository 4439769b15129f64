"""What becomes of a Slurm job when its tasks have ended: done, stopped for good, or once more.

Slurm requeues a job by itself when a node dies or the job is preempted; the time limit and crashes are
left to the job. Both kinds of restart go through the same guard: a job that starts again and again
without a newer checkpoint gives up. Imports nothing heavy: slurm/common.sh runs this file without the rest of
the package, since torch on a cold file system can take longer than Slurm waits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from clip_la.checkpoint_files import list_checkpoints, samples_of
from clip_la.exit_codes import EXIT_FAILED, EXIT_FINISHED, EXIT_NON_FINITE, EXIT_STOPPED, EXIT_USAGE

MAX_STALLED_RESTARTS = 3


@dataclass(frozen=True)
class Verdict:
    """The exit code that the batch script acts on (75: requeue), and why."""

    exit_code: int
    reason: str


def saved_samples(run_folder: Path) -> int:
    """Samples that the run's newest checkpoint has seen; 0 without one."""
    newest = list_checkpoints(run_folder / "checkpoints")[:1]
    return (samples_of(newest[0]) or 0) if newest else 0


def record_start(run_folder: Path, job: str, restart: int) -> None:
    """Note that a job starts, and from where."""
    entry = {"job": job, "restart": restart, "samples": saved_samples(run_folder), "time": time.time()}
    with _starts_file(run_folder).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def stalled_starts(run_folder: Path, job: str) -> int:
    """How many starts of this job in a row, up to now, have left no newer checkpoint."""
    file = _starts_file(run_folder)
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    starts = [entry for entry in map(json.loads, lines) if entry["job"] == job]
    now = saved_samples(run_folder)
    return sum(1 for _ in takewhile(lambda entry: entry["samples"] == now, reversed(starts)))


def _starts_file(run_folder: Path) -> Path:
    folder = run_folder / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "starts.jsonl"


def give_up_reason(run_folder: Path, job: str) -> str | None:
    """Why this job shouldn't start once more; None if it may."""
    num_starts = stalled_starts(run_folder, job)
    if num_starts <= MAX_STALLED_RESTARTS:
        return None
    return (
        f"giving up: {num_starts} starts of job {job} have left no checkpoint newer than "
        f"{saved_samples(run_folder):,} samples; {run_folder}/out.log and the job's output say why. "
        "A time limit too short for one save needs --save-every-minutes or more --time. "
        "Submit again to try once more"
    )


def read_exits(folder: Path | None, num_tasks: int) -> list[int]:
    """Exit codes that tasks left; a task that was killed left none.

    Each file is asked for by name: a listing of the folder may be half a minute old on NFS.
    """
    texts = [_text(folder / str(task)) for task in range(num_tasks)] if folder is not None else []
    return [int(text) for text in texts if text]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


def judge(run_folder: Path, job: str, exits: Sequence[int], num_tasks: int, signal: str) -> Verdict:
    """What is to be done, from the tasks' exit codes and the batch script's signal ("" if it got none)."""
    if EXIT_USAGE in exits:
        return Verdict(EXIT_USAGE, "the config can't be used: see the line that begins with clip-la: above")
    if EXIT_NON_FINITE in exits:
        return Verdict(
            EXIT_NON_FINITE,
            "stopped on steps that were not finite; the last good checkpoint is kept. "
            "Lower --lr or lengthen --warmup, then submit again",
        )
    if len(exits) == num_tasks and set(exits) == {EXIT_FINISHED}:
        return Verdict(EXIT_FINISHED, "finished")
    what = _what_happened(exits, num_tasks, signal)
    reason = give_up_reason(run_folder, job)
    if reason is not None:
        return Verdict(EXIT_FAILED, f"{what}; {reason}")
    return Verdict(EXIT_STOPPED, f"{what}; continuing from {saved_samples(run_folder):,} samples")


def _what_happened(exits: Sequence[int], num_tasks: int, signal: str) -> str:
    if set(exits) == {EXIT_STOPPED}:
        return f"stopped by {signal or 'a signal'} and saved"
    if signal:
        return f"stopped by {signal}"
    counts = [f"{count} with {code}" for code, count in sorted(Counter(exits).items())]
    if num_killed := num_tasks - len(exits):
        counts.append(f"{num_killed} without a code")
    return "crashed: of the tasks ended " + ", ".join(counts)


def main(argv: Sequence[str] | None = None) -> int:
    """The batch script's question: the reason goes to stderr, the exit code that it should take to stdout."""
    parser = argparse.ArgumentParser(prog="python -m clip_la.cluster.restarts", description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--job", required=True, help="SLURM_JOB_ID")
    parser.add_argument("--exits", default="", help="folder of the tasks' exit codes")
    parser.add_argument("--num-tasks", type=int, required=True)
    parser.add_argument("--signal", default="", help="the signal that the batch script got")
    args = parser.parse_args(argv)
    exits = read_exits(Path(args.exits) if args.exits else None, args.num_tasks)
    verdict = judge(args.run_folder, args.job, exits, args.num_tasks, args.signal)
    print(f"clip-la: {verdict.reason}", file=sys.stderr)
    print(verdict.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
