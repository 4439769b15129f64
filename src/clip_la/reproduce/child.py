"""One `clip-la train` as a process of its own, with one thread, that outlives neither us nor our terminal."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from clip_la.config import RunConfig
from clip_la.config_sources import write_yaml

_SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)


@dataclass(frozen=True)
class Child:
    """A training that has been started; `log` is where its output goes."""

    config: RunConfig
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def name(self) -> str:
        """Of the run."""
        return str(self.config.name)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -N if signal N ended it."""
        return self.process.poll()

    def terminate(self) -> None:
        """Ask it to save and exit."""
        if self.exit_code is None:
            self.process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Until it is gone."""
        self.process.wait()


def train_command(settings: Path) -> list[str]:
    """What is run for a training's YAML file."""
    return [sys.executable, "-m", "clip_la.cli", "train", "--config", str(settings)]


def settings_file(config: RunConfig) -> Path:
    """Where a training's settings are written when it is started."""
    return Path(config.logs) / f"{config.name}.yaml"


def start_child(config: RunConfig) -> Child:
    """Start training `config`, whose YAML file and log lie beside its run folder."""
    logs = Path(config.logs)
    logs.mkdir(parents=True, exist_ok=True)
    settings, log = settings_file(config), logs / f"{config.name}.log"
    partial = settings.with_suffix(".partial")
    write_yaml(config, partial)
    os.replace(partial, settings)
    with log.open("ab") as output:
        process = subprocess.Popen(
            train_command(settings),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C must come from us alone: a second signal ends it unsaved
            preexec_fn=_stop_with_parent if sys.platform == "linux" else None,
        )
    return Child(config, log, process)


def _stop_with_parent() -> None:
    """In the child: the kernel sends SIGTERM when we are gone, however that was."""
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


_LIBC = ctypes.CDLL(None)  # loaded before the fork
