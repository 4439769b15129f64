"""Where labelled images come from: a tree with one folder a class. Shards are in `shards`.

A source lists its images once, in an order of its own that is the same in every process; what reads them
afterwards asks for them by number. So batches, and with them all results, depend neither on the number of
processes nor on where an evaluation was interrupted.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp"})


class RawImage(NamedTuple):
    """The bytes of an image.

    Attributes:
        where: its path, or its shard and key.
        data: as stored; empty where it could not be read.
        error: why it could not be read, if so.
    """

    where: str
    data: bytes
    error: str = ""


class ImageReader(Protocol):
    """Numbered images."""

    def read(self, numbers: Iterable[int]) -> Iterator[RawImage]:
        """The images of the given numbers, which ascend; one item for each."""
        ...


class ImageSource(ImageReader, Protocol):
    """Labelled images in a fixed order.

    Attributes:
        name: what people call it.
        noun: what its labels are: "folder" or "label".
        labels: the distinct labels; some may have no image.
        label_of: for each image, its label's index in `labels`.
        unusable: one line on each thing that was found to be no usable image when it was listed.
        num_other_files: files in class folders that are no images by their suffix.
    """

    name: str
    noun: str
    labels: tuple[str, ...]
    label_of: Sequence[int]
    unusable: tuple[str, ...]
    num_other_files: int

    def file_beside(self, name: str) -> Path | None:
        """A file of that name that goes with the images, such as a class list, if there is one."""
        ...


def hash_of_list(source: ImageSource) -> str:
    """SHA-256, in hex, of a source's images in their order: names and labels, not bytes."""
    digest = hashlib.sha256()
    for text in (source.name, *source.labels):
        digest.update(text.encode("utf-8", "surrogateescape") + b"\0")
    digest.update(array("q", source.label_of).tobytes())
    return digest.hexdigest()


class FolderImages:
    """The images of a tree, folder by folder; see `ImageSource`.

    Raises:
        ValueError: no such folder, no class folder in it, or no image in any; says what is there.
        OSError: a folder that can't be listed.
    """

    noun = "folder"

    def __init__(self, root: str | Path) -> None:
        tree = list_image_tree(root)
        self.name = str(root)
        self._root = tree.root
        self.labels = tuple(tree.files)
        self.label_of: Sequence[int] = array(
            "l", (i for i, paths in enumerate(tree.files.values()) for _ in paths)
        )
        self.unusable: tuple[str, ...] = ()
        self.num_other_files = tree.num_other_files
        self._paths = [path for paths in tree.files.values() for path in paths]

    def read(self, numbers: Iterable[int]) -> Iterator[RawImage]:
        """The images of the given numbers."""
        for number in numbers:
            path = self._paths[number]
            try:
                yield RawImage(str(path), path.read_bytes())
            except OSError as error:
                yield RawImage(str(path), b"", error.strerror or str(error))

    def file_beside(self, name: str) -> Path | None:
        """A file of that name in the tree, if there is one."""
        path = self._root / name
        return path if path.is_file() else None


@dataclass(frozen=True)
class ImageTree:
    """Class folders of a tree and the image files below each, both sorted by name.

    Attributes:
        root: the folder that holds the class folders.
        files: folder name -> its image files, at any depth.
        num_other_files: files below class folders that are no images by their suffix.
    """

    root: Path
    files: dict[str, tuple[Path, ...]]
    num_other_files: int


def list_image_tree(root: str | Path) -> ImageTree:
    """List a tree. Hidden files and folders, and files beside the class folders, are no part of it.

    Raises:
        ValueError: no such folder, no class folder in it, or no image in any; says what is there.
        OSError: a folder that can't be listed.
    """
    root = Path(root)
    if not root.is_dir():
        found = "a file" if root.exists() else "nothing"
        raise ValueError(f"expected a folder with one folder of images a class at {root}; found {found}")
    entries = sorted(entry for entry in root.iterdir() if not entry.name.startswith("."))
    folders = [entry for entry in entries if entry.is_dir()]
    if not folders:
        num_images = sum(_is_image(entry) for entry in entries)
        raise ValueError(
            f"{root} has no class folders, but {len(entries)} file(s), of which {num_images} image(s); "
            "expected one folder of images a class"
        )
    below = {folder.name: sorted(_files_below(folder)) for folder in folders}
    files = {name: tuple(path for path in paths if _is_image(path)) for name, paths in below.items()}
    num_images = sum(map(len, files.values()))
    num_files = sum(map(len, below.values()))
    if not num_images:
        raise ValueError(
            f"no images in the {len(folders)} class folders of {root} ({num_files} other files); "
            f"images end in {', '.join(sorted(IMAGE_SUFFIXES))}"
        )
    return ImageTree(root, files, num_files - num_images)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES


def _files_below(folder: Path) -> Iterable[Path]:
    """Files at any depth, links followed, each real folder once."""
    seen: set[str] = set()
    for directory, subfolders, names in os.walk(folder, followlinks=True, onerror=_raise):
        real = os.path.realpath(directory)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        yield from (Path(directory, name) for name in names if not name.startswith("."))


def _raise(error: OSError) -> None:
    raise error
