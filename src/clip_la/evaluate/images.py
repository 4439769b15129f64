"""The images of a tree with one folder a class, decoded as in training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from clip_la.data.decode import Unusable, decode_image
from clip_la.data.losses import Cause
from clip_la.data.spec import Limits

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp"})


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


def _files_below(folder: Path) -> Iterator[Path]:
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


class ImageBatch(NamedTuple):
    """The readable images of a batch, and the others.

    Attributes:
        images: float32 (n, 3, height, width).
        labels: int64 (n,).
        unreadable: path and reason of each image that could not be read.
    """

    images: Tensor
    labels: Tensor
    unreadable: list[str]


class _LabelledImages(Dataset[tuple[Tensor | None, int, str]]):
    """(transformed image or None, label, reason why it is None)."""

    def __init__(
        self, files: Sequence[tuple[Path, int]], preprocess: Callable[[Image.Image], Tensor]
    ) -> None:
        self._files = files
        self._preprocess = preprocess
        self._limits = Limits()

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor | None, int, str]:
        path, label = self._files[index]
        try:
            image = decode_image(path.read_bytes(), self._limits)
        except OSError as error:
            return None, label, f"{path}: {error.strerror or error}"
        except Unusable as error:
            return None, label, f"{path}: {error.cause} ({error.detail})"
        try:
            return self._preprocess(image), label, ""
        except Exception as error:  # as in training, a picture that the transform can't take is counted
            return None, label, f"{path}: {Cause.IMAGE_TRANSFORM} ({error!r})"


def load_images(
    files: Sequence[tuple[Path, int]],
    preprocess: Callable[[Image.Image], Tensor],
    *,
    batch_size: int,
    num_workers: int,
    rank: int = 0,
    world_size: int = 1,
) -> Iterable[ImageBatch]:
    """Batches of (path, label), in order; rank r takes batches r, r + world_size, ...

    Sharded by whole batches, an image lies in the same batch, beside the same others, whatever the number of
    ranks: so the features, and with them all counts, are the same to the last bit.
    """
    starts = range(rank * batch_size, len(files), world_size * batch_size)
    batches = [list(range(start, min(start + batch_size, len(files)))) for start in starts]
    loader: DataLoader[Any] = DataLoader(
        _LabelledImages(files, preprocess),
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=_collate,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # leaves the training process's own generator alone
    )
    return loader


def _collate(samples: Sequence[tuple[Tensor | None, int, str]]) -> ImageBatch:
    readable = [(image, label) for image, label, _ in samples if image is not None]
    return ImageBatch(
        images=torch.stack([image for image, _ in readable]) if readable else torch.empty(0),
        labels=torch.tensor([label for _, label in readable], dtype=torch.int64),
        unreadable=[reason for image, _, reason in samples if image is None],
    )
