"""How long each panel took, over all calls that worked on it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def timed(file: Path, panel: str) -> Iterator[None]:
    """Add the seconds spent inside to the panel's, however it ends (short of being killed)."""
    started = time.monotonic()
    try:
        yield
    finally:
        seconds = _read(file)
        seconds[panel] = seconds.get(panel, 0.0) + time.monotonic() - started
        partial = file.with_name(f".{file.name}")
        partial.write_text(json.dumps(seconds) + "\n", encoding="utf-8")
        os.replace(partial, file)


def seconds_taken(file: Path, panel: str) -> float:
    """Over all calls so far."""
    return _read(file).get(panel, 0.0)


def _read(file: Path) -> dict[str, float]:
    seconds: dict[str, float] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return seconds
