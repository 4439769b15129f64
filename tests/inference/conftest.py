"""A trained run, once for all tests of inference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_run import train_tiny_run


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny_run(tmp_path_factory.mktemp("inference"))
