"""The H200 scale: LAION-400M on a Slurm cluster. What to submit, its cost, and the figures of what is there.

It needs shards, a cluster and many GPU-hours. Called again, it submits nothing twice, and makes the
figures of the runs that have finished.

    OUT/configs/, models/      run and model configs of the sizes that configs/laion400m lacks
    OUT/runs/                  run folders, where the jobs put them
    OUT/time/                  what `clip-la bench` measured on one GPU
    OUT/submitted.json         the commands that were run
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from clip_la.config import ConfigError
from clip_la.report.runs import read_run
from clip_la.reproduce.convergence_panel import convergence_panel, read_curves
from clip_la.reproduce.fit_panel import fit_panel
from clip_la.reproduce.h200_plan import (
    CONVERGENCE_SIZE,
    ClusterRun,
    Command,
    commands_of,
    configs_of,
    format_plan,
    state_of,
)
from clip_la.reproduce.panel import Panel
from clip_la.reproduce.time_panel import draw_time_panel
from clip_la.reproduce.write import write_panels

logger = logging.getLogger(__name__)


def reproduce(run: ClusterRun, *, dry_run: bool) -> tuple[list[Panel], list[Path]]:
    """Print the plan, submit what wasn't, and make the figures of what has finished.

    Returns:
        The panels and the files written; none where nothing has finished.

    Raises:
        ConfigError: no clone of the repository at `repo`, no shards, or no sbatch here.
    """
    if not (run.repo / "slurm" / "compare.sbatch").is_file():
        raise ConfigError(
            f"no slurm/compare.sbatch in {run.repo}; give a clone of the repository with --repo"
        )
    run.out.mkdir(parents=True, exist_ok=True)
    commands = list(commands_of(run))
    print(format_plan(run, commands))
    if dry_run:
        return [], []
    if "train_data" not in run.flags:
        raise ConfigError(
            "--scale h200 needs --data: LAION-400M's shards, as '/data/laion400m/{00000..41455}.tar'"
        )
    _submit(run, commands)
    panels = list(_panels(run))
    if not panels:
        print("no run has finished yet: call this again for the figures")
        return [], []
    return panels, write_panels(panels, _about(run), _unfinished(run), run.out)


def _submit(run: ClusterRun, commands: Sequence[Command]) -> None:
    """Run what wasn't run before; noted one by one, so that a failure in the middle submits nothing twice."""
    file = run.out / "submitted.json"
    done = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    for command in commands:
        if str(command) in done:
            logger.info("submitted before (remove its line from %s to do it again): %s", file, command.title)
            continue
        _call(command)
        done.append(str(command))
        file.write_text(json.dumps(done, indent=2) + "\n", encoding="utf-8")


def _call(command: Command) -> None:
    print(f"running: {command}")
    try:
        code = subprocess.run(command.argv, env={**os.environ, **command.environment}, check=False).returncode
    except FileNotFoundError:
        raise ConfigError(
            f"no {command.argv[0]} on this machine; call this on a login node, or look with --dry-run"
        ) from None
    if code:
        raise ConfigError(f"{command.title}: not submitted, {command.argv[0]} ended with {code} (see above)")


# --- The figures ------------------------------------------------------------------------------------


def _panels(run: ClusterRun) -> Iterator[Panel]:
    """Those of `run.panels` that there is enough for."""
    if "time" in run.panels and (run.out / "time" / "bench.json").exists():
        yield draw_time_panel(run.out / "time")
    finished = _finished(run)
    same_size = {kind: [path] for (size, kind), path in finished.items() if size == CONVERGENCE_SIZE}
    if "convergence" in run.panels and "softmax" in same_size and len(same_size) > 1:
        curves = read_curves(same_size)
        yield convergence_panel(curves, _facts(list(same_size.values())), run.out / "convergence")
    sizes = {size for size, kind in finished if kind == "softmax"}
    if "fit" in run.panels and len(sizes) > 1:
        folders = [path for (size, _), path in finished.items() if size in sizes]
        yield fit_panel(folders, _facts([folders]), run.out / "fit")


def _finished(run: ClusterRun) -> dict[tuple[str, str], Path]:
    keys = configs_of(run)
    return {key: run.folder(*key) for key in keys if state_of(run.folder(*key)) == "finished"}


def _facts(folders: Sequence[Sequence[Path]]) -> dict[str, str]:
    """What the runs' own records say; each only once where all agree."""
    runs = [read_run(path) for group in folders for path in group]
    told = {
        "Data": [f"{run.config['train_data']}, held out {run.config.get('val_data')}" for run in runs],
        "Sizes": [str(run.start["model"]) for run in runs],
        "Budget": [
            f"{run.start['samples_total']:,} samples, batch {run.start['global_batch_size']:,}, "
            f"learning rate {run.config['lr']:g}, {run.config['precision']}"
            for run in runs
        ],
        "Seeds": [str(run.config["seed"]) for run in runs],
    }
    return {key: "; ".join(dict.fromkeys(values)) for key, values in told.items()}


def _unfinished(run: ClusterRun) -> str | None:
    """What a reader must know: which runs the figures lack."""
    states = {run.folder(*key).name: state_of(run.folder(*key)) for key in configs_of(run)}
    missing = [f"{name} ({state})" for name, state in states.items() if state != "finished"]
    return f"Not all runs have finished. Left out: {', '.join(missing)}." if missing else None


def _about(run: ClusterRun) -> dict[str, Any]:
    return {
        "Made with": "clip-la reproduce --scale h200",
        "Runs": f"{run.runs}, {run.nodes} nodes x {run.gpus_per_node} GPUs each",
    }
