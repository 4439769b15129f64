"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """A folder of real shards and zero-shot trees beside the repository, for those who have it."""
    folder = Path(os.environ.get("CLIP_LA_SHARED_DATA", REPO_ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder} (set CLIP_LA_SHARED_DATA)")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads or fills the user's own cache of evaluations."""
    os.environ["CLIP_LA_CACHE"] = str(tmp_path_factory.mktemp("cache"))
