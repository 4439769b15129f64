"""Run folders to read, compare and report on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_writer import FinishedRun, NewRun, RunWriter


@pytest.fixture
def new_run(tmp_path: Path) -> NewRun:
    """new_run(NAME, **config) -> a writer of the folder tmp_path/logs/NAME."""

    def make(name: str, **config: Any) -> RunWriter:
        return RunWriter(tmp_path / "logs" / name, **config)

    return make


@pytest.fixture
def finished_run(new_run: NewRun) -> FinishedRun:
    """finished_run(NAME, config={}, **run_start fields) -> the folder of a healthy run of 1000 samples."""

    def make(name: str, config: dict[str, Any] | None = None, **start: Any) -> Path:
        run = new_run(name, **(config or {})).start(**start)
        for samples in range(100, 1001, 100):
            run.train(samples, 3.0 - 0.002 * samples)
        run.epoch(1000, 0, 2.0).eval(1000, "validation", loss=1.2, num_samples=500).zeroshot(1000, 0.4)
        return run.end(1000).folder

    return make
