"""The answers of an evaluation, a batch a line, so that one that was killed goes on where it was.

Each rank appends to a file of its own. A batch is the same whoever computes it, so the files of an earlier
start are good for any number of ranks, and a batch that two of them hold counts once.
"""

from __future__ import annotations

import json
import logging
import shutil
import zlib
from pathlib import Path
from typing import TextIO

from clip_la.evaluate.ranks import rank_and_world_size
from clip_la.evaluate.tally import Answers

_logger = logging.getLogger(__name__)


class Journal:
    """The answers in one folder, which may not exist yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: TextIO | None = None
        self._is_writable = True

    def read(self) -> dict[int, Answers]:
        """The answers of all ranks of earlier starts, by batch. Lines that a kill tore are left out."""
        answers = (
            _parse(line)
            for path in sorted(self._folder.glob("*.jsonl"))
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        )
        return {found.batch: found for found in answers if found is not None}

    def append(self, answers: Answers) -> None:
        """Add a batch; where that fails, one warning, and the evaluation goes on without."""
        if not self._is_writable:
            return
        try:
            if self._file is None:
                self._file = self._open()
            self._file.write(_format(answers))
            self._file.flush()
        except OSError as error:
            self._is_writable = False
            _logger.warning("if this evaluation is interrupted it will start again from nothing: %s", error)

    def close(self) -> None:
        """Close this rank's file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Remove all ranks' files: the evaluation has ended."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _open(self) -> TextIO:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = (self._folder / f"rank-{rank_and_world_size()[0]}.jsonl").open("a", encoding="utf-8")
        file.write("\n")  # a kill may have torn the last line; an empty one is harmless
        return file


def _format(answers: Answers) -> str:
    text = json.dumps(answers)
    return f"{zlib.crc32(text.encode()):08x} {text}\n"


def _parse(line: str) -> Answers | None:
    """The answers of a line; None where its checksum isn't right."""
    checksum, _, text = line.partition(" ")
    if checksum != f"{zlib.crc32(text.encode()):08x}":
        return None
    return Answers(*json.loads(text))
