"""Which files of a folder are a run's checkpoints, told by their names. Imports nothing that takes time."""

from __future__ import annotations

import re
from pathlib import Path

_FILE_NAME = re.compile(r"(?:rolling|epoch_\d+)_(\d+)\.pt")


def samples_of(path: Path) -> int | None:
    """The samples that a checkpoint file's name says it has seen; None for any other file."""
    match = _FILE_NAME.fullmatch(path.name)
    return int(match.group(1)) if match else None


def list_checkpoints(folder: Path) -> list[Path]:
    """A run's checkpoint files, newest first. Other files in the folder don't count, nor do other folders."""
    found = [(samples, path) for path in folder.glob("*.pt") if (samples := samples_of(path)) is not None]
    return [path for _, path in sorted(found, reverse=True)]
