"""A person's pictures and texts as numbered units of raw samples: a folder, shards, a file of lines."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from clip_la.data.losses import Cause, Loss
from clip_la.data.samples import RawSample, read_shard
from clip_la.data.spec import Limits
from clip_la.data.storage import OpenOptions
from clip_la.data.urls import expand_shards
from clip_la.evaluate.images import IMAGE_SUFFIXES
from clip_la.evaluate.shards import find_shards


class Units(Protocol):
    """Numbered units of raw samples; a unit is read from its start, always in the same order."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """What is known of each sample, beside its caption: some of `METADATA_COLUMNS`."""
        ...

    @property
    def num_samples(self) -> int | None:
        """How many there are; None where only reading tells."""
        ...

    def __len__(self) -> int: ...

    def read(self, unit: int, /) -> Iterator[RawSample | Loss]:
        """The samples of one unit."""
        ...

    def hash(self) -> str:
        """Of the list of units, to tell whether it is the same as before."""
        ...


METADATA_COLUMNS = ("image_path", "shard", "url", "json", "line")


def list_images(folder: Path) -> list[Path]:
    """Image files at any depth, by name. Links are followed, each real folder once; hidden ones are left out.

    Raises:
        OSError: a folder that can't be listed.
    """
    found: list[Path] = []
    seen: set[str] = set()
    for directory, subfolders, names in os.walk(folder, followlinks=True, onerror=_raise):
        real = os.path.realpath(directory)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(directory, name) for name in names if is_image(name)]
    return sorted(found)


def is_image(name: str) -> bool:
    """Whether a file is an image by its name, and not hidden."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES and not name.startswith(".")


def _raise(error: OSError) -> None:
    raise error


def open_images(images: str) -> Units:
    """A folder of images, a folder of shards, or a shard list as in training.

    Raises:
        ValueError: nothing there, or no image in it.
    """
    shards = find_shards(images)
    return ShardUnits(shards) if shards is not None else FolderUnits(Path(images))


class FolderUnits:
    """The images of a folder, at any depth; a unit is a file. A caption is the `.txt` of the same name."""

    columns = ("image_path",)

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            found = "a file" if folder.exists() else "nothing"
            raise ValueError(
                f"expected a folder of images, or shards ending in .tar; found {found} at {folder}"
            )
        self.name = str(folder)
        self._files = list_images(folder)
        if not self._files:
            raise ValueError(
                f"no image in {folder}; images end in {', '.join(sorted(IMAGE_SUFFIXES))}, shards in .tar"
            )
        self.num_samples: int | None = len(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def read(self, unit: int, /) -> Iterator[RawSample | Loss]:
        """The one image."""
        path = self._files[unit]
        try:
            text = path.with_suffix(".txt").read_bytes() if path.with_suffix(".txt").is_file() else b""
            yield RawSample("", str(path), path.read_bytes(), text)
        except OSError as error:
            yield Loss(Cause.IMAGE_UNREADABLE, self.name, str(path), error.strerror or str(error))

    def hash(self) -> str:
        """Of the paths."""
        return _hash(map(str, self._files))


class ShardUnits:
    """Images of shards, with or without captions; a unit is a shard."""

    columns = ("image_path", "shard", "url", "json")
    num_samples: int | None = None

    def __init__(self, shards: str) -> None:
        self.name = shards
        self._urls = expand_shards(shards)

    def __len__(self) -> int:
        return len(self._urls)

    def read(self, unit: int, /) -> Iterator[RawSample | Loss]:
        """The samples of one shard."""
        return read_shard(self._urls[unit], Limits(), OpenOptions(), images_alone=True)

    def hash(self) -> str:
        """Of the URLs."""
        return _hash(self._urls)


class TextLines:
    """The lines of a UTF-8 file as captions; the file is the one unit.

    Raises:
        ValueError: no such file.
    """

    columns = ("line",)
    num_samples: int | None = None

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ValueError(
                f"--texts: expected `captions` or a text file, one text a line; found neither at {path}"
            )
        self.name = str(path)
        self._path = path

    def __len__(self) -> int:
        return 1

    def read(self, unit: int, /) -> Iterator[RawSample | Loss]:
        """One sample without an image a line; its key is the line's number, from 1."""
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield RawSample("", str(number), b"", line)

    def hash(self) -> str:
        """Of the file's name and size."""
        return _hash([self.name, str(self._path.stat().st_size)])


def _hash(names: Iterator[str] | list[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        digest.update(os.fsencode(name) + b"\0")
    return digest.hexdigest()[:16]
