"""Tables of image paths and captions (CSV, TSV), held as two flat buffers that workers share."""

from __future__ import annotations

import csv
import os
from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from clip_la.data.losses import Cause, Loss
from clip_la.data.samples import RawSample
from clip_la.data.spec import Limits
from clip_la.data.storage import NotAFileError, OpenOptions, TooLargeError, read_small

MAX_ROW_LINES = 1000


class TableError(ValueError):
    """A table that can't be used, with what to do about it."""


class Table:
    """Rows of (image path, caption).

    The rows lie in one bytes object, so that forked workers share it and don't copy it bit by bit
    as their reference counts change.

    Args:
        path: of the file.
        image_key, caption_key: columns.
        separator: between columns.
        limits: image and caption bytes.

    Raises:
        TableError: no such columns, no rows, or a quote that is never closed.
    """

    def __init__(
        self,
        path: str,
        *,
        image_key: str = "filepath",
        caption_key: str = "title",
        separator: str = "\t",
        limits: Limits | None = None,
        options: OpenOptions | None = None,
    ) -> None:
        self.path = path
        self._limits = limits or Limits()
        self._options = replace(options or OpenOptions(), allow_pipe=False)
        self._ends = array("q")
        rows = bytearray()
        csv.field_size_limit(self._limits.caption_bytes)
        for image, caption in _read_rows(path, image_key, caption_key, separator):
            rows += image
            self._ends.append(len(rows))
            rows += caption
            self._ends.append(len(rows))
        if not self._ends:
            raise TableError(f"{path} has a header but no rows")
        self._rows = bytes(rows)

    def __len__(self) -> int:
        return len(self._ends) // 2

    def name(self, row: int, /) -> str:
        """Table and row."""
        return f"{self.path} row {row}"

    def count_samples(self) -> int:
        """The rows."""
        return len(self)

    def weights(self) -> None:
        """All rows alike."""

    def read(self, row: int, /) -> Iterator[RawSample | Loss]:
        """The one sample of a row, numbered from 0 after the header."""
        image, caption = self._field(2 * row), self._field(2 * row + 1)
        path = os.fsdecode(image)
        if not path:
            yield Loss(Cause.BAD_ROW, self.path, str(row), "no image path, or too few columns")
            return
        try:
            yield RawSample(
                self.path, path, read_small(path, self._limits.member_bytes, self._options), caption
            )
        except (FileNotFoundError, NotAFileError) as error:
            yield Loss(Cause.NO_IMAGE, self.path, path, error.strerror or str(error))
        except TooLargeError as error:
            yield Loss(Cause.MEMBER_TOO_LARGE, self.path, path, str(error))
        except (OSError, ValueError) as error:  # ValueError: no such path can exist
            yield Loss(Cause.IMAGE_UNREADABLE, self.path, path, str(error))

    def _field(self, index: int) -> bytes:
        start = self._ends[index - 1] if index else 0
        return self._rows[start : self._ends[index]]


def _read_rows(path: str, image_key: str, caption_key: str, separator: str) -> Iterator[tuple[bytes, bytes]]:
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, delimiter=separator)
        header = next(reader, [])
        missing = [key for key in (image_key, caption_key) if key not in header]
        if missing:
            raise TableError(
                f"{path} has no column {', '.join(missing)}; its columns are {', '.join(header)} "
                "(see --csv-img-key, --csv-caption-key, --csv-separator)"
            )
        image_column, caption_column = header.index(image_key), header.index(caption_key)
        for row in _skip_broken(reader, path):
            if len(row) <= max(image_column, caption_column):
                yield b"", b""
            else:
                yield _encode(row[image_column]), _encode(row[caption_column])


def _skip_broken(reader: Any, path: str) -> Iterator[list[str]]:
    """The rows of a csv.reader; [] in place of one that it can't read."""
    while True:
        before = reader.line_num
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error:
            row = []
        if reader.line_num - before > MAX_ROW_LINES:
            raise TableError(
                f"{path}: the row at line {before + 1} runs on for {reader.line_num - before:,} lines: "
                "a quote that is never closed swallows the rows behind; close it, or double it in a caption"
            )
        yield row


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
