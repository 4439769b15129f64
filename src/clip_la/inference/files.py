"""Files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write under a temporary name beside `path`, flush to disk, rename; the folder is made if need be.

    Raises:
        OSError: it can't be written; what was at `path` is still there, and nothing beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """`write_file` of UTF-8 text."""
    write_file(path, lambda file: file.write(text.encode("utf-8", "backslashreplace")))
