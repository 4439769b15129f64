"""Many trainings, a few at a time, each a `clip-la train` of its own; run again, it goes on where it was.

    train_all([Training("softmax", {"model": "ViT-nano-8", ...}), ...], Path("logs"))

Under `logs`, NAME.yaml is what a training was asked for, NAME.log what it printed, NAME/ its run folder.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clip_la.config import ConfigError, RunConfig
from clip_la.config_sources import load_run_config
from clip_la.errors import ExpectedError
from clip_la.exit_codes import EXIT_FINISHED, EXIT_NON_FINITE, EXIT_STOPPED
from clip_la.report.log import read_log
from clip_la.reproduce.child import Child, settings_file, start_child
from clip_la.reproduce.progress import Progress
from clip_la.train.signals import StopRequest

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_LAST_LINES = 12


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        name: of its run folder.
        flags: settings of `clip-la train` by their names in `RunConfig`, without name and logs and with
            train_num_samples, so that the work ahead is known.
        cost: time a sample takes, relative to other trainings' samples; only the time left depends on it.
    """

    name: str
    flags: Mapping[str, Any]
    cost: float = 1.0


class TrainingFailedError(ExpectedError):
    """A training ended with an error; the others have been told to save and stop."""


class TrainingsStoppedError(ExpectedError):
    """A signal came; the trainings have saved."""

    exit_code = EXIT_STOPPED


@dataclass
class _Queue:
    """What is waiting, what runs, and how one ends."""

    waiting: list[RunConfig]
    accept_non_finite: bool
    running: list[Child] = field(default_factory=list)

    @property
    def outcomes(self) -> tuple[str, ...]:
        """The reasons of run_end lines after which a training isn't run again."""
        return ("finished", "non_finite") if self.accept_non_finite else ("finished",)

    def fill(self, processes: int) -> None:
        """Start waiting trainings until so many run."""
        while self.waiting and len(self.running) < processes:
            self.running.append(start_child(self.waiting.pop(0)))

    def collect(self) -> list[Child]:
        """Those that have ended since the last call."""
        ended = [child for child in self.running if child.exit_code is not None]
        self.running = [child for child in self.running if child not in ended]
        return ended

    def stop(self) -> None:
        """Have the running ones save and exit, and wait for that."""
        for child in self.running:
            child.terminate()
        for child in self.running:
            child.wait()


def train_all(
    trainings: Sequence[Training],
    logs: Path,
    *,
    processes: int = 2,
    keep_checkpoints: bool = True,
    accept_non_finite: bool = False,
    title: str = "training",
) -> list[Path]:
    """Train all of them to their ends, `processes` at once with one thread each.

    Args:
        trainings: with unique names; earlier ones start first.
        logs: folder of the run folders.
        processes: how many train at the same time.
        keep_checkpoints: False removes a training's checkpoints once it has finished.
        accept_non_finite: one that `--max-bad-steps` ended counts as done, as sweeps of learning rates need.
        title: of the progress bar.

    Returns:
        The run folders, in the order given.

    Raises:
        ConfigError: settings that can't be used, or a run folder of that name has others; nothing is started.
        TrainingFailedError: one failed; the message says which, why and what to do.
        TrainingsStoppedError: SIGTERM, SIGUSR1 or SIGINT came, and all have saved. A second one ends all at
            once.
    """
    configs = [_config(training, logs) for training in trainings]
    _refuse_twins(configs)
    queue = _Queue([], accept_non_finite)
    queue.waiting = [config for config in configs if _end_reason(_folder(config)) not in queue.outcomes]
    for config in configs:
        _refuse_other_settings(config)
    costs = {training.name: training.cost for training in trainings}
    with StopRequest() as stop, Progress(title, configs, costs, queue.waiting) as progress:
        try:
            _run(queue, processes, stop, progress)
        finally:
            queue.stop()
    folders = [_folder(config) for config in configs]
    if not keep_checkpoints:
        for folder in folders:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return folders


def _run(queue: _Queue, processes: int, stop: StopRequest, progress: Progress) -> None:
    while queue.waiting or queue.running:
        if stop.requested:
            progress.say(
                f"{stop.signal_name}: the trainings save and stop; a second signal ends them at once"
            )
            queue.stop()
            raise TrainingsStoppedError("stopped, and saved; run the same command again to continue")
        queue.fill(processes)
        time.sleep(_POLL_SECONDS)
        for child in queue.collect():
            _judge(child, queue.accept_non_finite)
            progress.ended(child.name)
        progress.show([child.config for child in queue.running])


def _judge(child: Child, accept_non_finite: bool) -> None:
    """Raise unless the child has done its work."""
    code = child.exit_code
    if code == EXIT_FINISHED or (accept_non_finite and code == EXIT_NON_FINITE):
        return
    lines = child.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    raise TrainingFailedError(
        f"training {child.name} ended with exit code {code}: {_advice(child)}\n"
        f"The end of {child.log}:\n" + "\n".join(f"  {line}" for line in lines)
    )


def _advice(child: Child) -> str:
    again = "then run the same command again: what has finished stays"
    if child.exit_code == EXIT_STOPPED:
        return "something else stopped it, and it has saved; run the same command again"
    if child.exit_code == EXIT_NON_FINITE:
        return f"its loss or gradient was not finite too often; lower its learning rate, {again}"
    if child.exit_code in (-9, 137):
        return f"it was killed, as a system does that is out of memory; train fewer at a time, {again}"
    return f"put right what its last lines say, {again}"


def _config(training: Training, logs: Path) -> RunConfig:
    config = load_run_config(None, {**training.flags, "name": training.name, "logs": str(logs)})
    if config.train_num_samples is None:
        raise ConfigError(
            f"training {training.name} has no train_num_samples; give it, so that its length is known"
        )
    return config


def _folder(config: RunConfig) -> Path:
    return Path(config.logs) / str(config.name)


def _end_reason(folder: Path) -> str | None:
    metrics = folder / "metrics.jsonl"
    end = read_log(metrics).end if metrics.exists() else None
    return end.reason if end else None


def _refuse_twins(configs: Sequence[RunConfig]) -> None:
    names = [str(config.name) for config in configs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"trainings with one name: {', '.join(twice)}; each needs a folder of its own")


def _refuse_other_settings(config: RunConfig) -> None:
    """A finished run of other settings would be taken for this one's result."""
    folder = _folder(config)
    if not (folder / "metrics.jsonl").exists():
        return
    asked_for = settings_file(config)
    before = load_run_config(asked_for if asked_for.exists() else folder / "config.yaml", {})
    differ = [
        f"{entry.name} {getattr(before, entry.name)!r}, now {getattr(config, entry.name)!r}"
        for entry in dataclasses.fields(config)
        if entry.name != "logs" and getattr(before, entry.name) != getattr(config, entry.name)
    ]
    if differ:
        raise ConfigError(
            f"{folder} was trained with other settings: {'; '.join(differ)}. Remove it to train it anew, or "
            "write to another folder"
        )
