"""The folder of embeddings, in the layout of clip-retrieval: numbered parts, each whole or not there.

img_emb/img_emb_0.npy           (rows, embed_dim), L2-normalised
text_emb/text_emb_0.npy         the same of the captions
metadata/metadata_0.parquet     a row for each of theirs
unusable/unusable_0.jsonl       what was dropped on the way, and why
parts/part_0.json               written last: the part is whole, and where reading went on after it
embed.json                      what this was made from; a second start compares it
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from clip_la.data.losses import Loss
from clip_la.inference.files import write_file
from clip_la.inference.rows import Position

SETTINGS_FILE = "embed.json"


@dataclass
class Part:
    """Rows of one part, in order.

    Attributes:
        arrays: "img_emb" and "text_emb", those that are asked for: batches of rows.
        metadata: column -> values.
        unusable: what was dropped.
    """

    arrays: dict[str, list[npt.NDArray[np.floating[Any]]]]
    metadata: dict[str, list[Any]]
    unusable: list[Loss] = field(default_factory=list)
    num_rows: int = 0


@dataclass(frozen=True)
class Done:
    """What a marker says of a whole part."""

    next: Position
    num_rows: int
    losses: Mapping[str, int]


class PartFolder:
    """Reads and writes the parts of one folder.

    Args:
        folder: made if need be.
        settings: whatever the parts are a function of; an earlier start's must be equal.

    Raises:
        ValueError: the folder holds something else, or parts made from something else.
        OSError: it can't be written.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        path = folder / SETTINGS_FILE
        if path.is_file():
            _refuse_other(folder, json.loads(path.read_text(encoding="utf-8")), settings)
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(
                f"{folder} is not empty and holds no embeddings of clip-la embed; give another --out"
            )
        for leftover in folder.glob("*/*.tmp"):
            leftover.unlink()
        write_file(path, lambda file: file.write(_json(settings)))

    def done(self) -> list[Done]:
        """The whole parts from the first on; a gap ends the list."""
        found: list[Done] = []
        while (path := self._path("parts", "part", len(found), "json")).is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            found.append(Done(Position(*content["next"]), content["num_rows"], content["losses"]))
        return found

    def write(self, number: int, part: Part, after: Position) -> Done:
        """Write a part; its marker comes last.

        Raises:
            OSError: it can't be written; the parts before it are kept, and nothing half-written is left.
        """
        if part.num_rows:
            for name, batches in part.arrays.items():
                save = partial(np.save, arr=np.concatenate(batches))
                self._write(name, name, number, "npy", save)
            self._write("metadata", "metadata", number, "parquet", lambda file: _parquet(file, part.metadata))
        if part.unusable:
            lines = b"".join(_json(loss.to_dict(), indent=None) for loss in part.unusable)
            self._write("unusable", "unusable", number, "jsonl", lambda file: file.write(lines))
        losses = dict(Counter(loss.cause.value for loss in part.unusable))
        done = Done(after, part.num_rows, losses)
        marker = {"next": list(after), "num_rows": done.num_rows, "losses": losses}
        self._write("parts", "part", number, "json", lambda file: file.write(_json(marker)))
        return done

    def _path(self, folder: str, name: str, number: int, suffix: str) -> Path:
        return self.folder / folder / f"{name}_{number}.{suffix}"

    def _write(
        self, folder: str, name: str, number: int, suffix: str, write: Callable[[BinaryIO], object]
    ) -> None:
        write_file(self._path(folder, name, number, suffix), write)


def _json(content: Any, indent: int | None = 2) -> bytes:
    return (json.dumps(content, indent=indent) + "\n").encode()


def _parquet(file: BinaryIO, columns: Mapping[str, Sequence[Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({name: pyarrow.array(values, pyarrow.string()) for name, values in columns.items()})
    parquet.write_table(table, file)


def _refuse_other(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    differs = [
        f"{key} was {before.get(key)}, is {now.get(key)}"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    ]
    if differs:
        raise ValueError(
            f"{folder} holds embeddings of something else ({'; '.join(differs)}); give another --out"
        )
