"""Small labelled shards for tests, made from the images of a tree."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

Member = tuple[str, bytes]


def write_tar(path: Path, members: Iterable[Member]) -> Path:
    """A tar of regular files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def shards_of_tree(
    tree: Path, folder: Path, label: Callable[[str], str], sizes: Iterable[int] = (11, 0, 3, 1, 10**6)
) -> str:
    """The tree's images, in shards of the given sizes, with a `.cls` made of their folder's name."""
    images = [path for path in sorted(tree.glob("*/*")) if path.suffix == ".png"]
    for shard, size in enumerate(sizes):
        members: list[Member] = []
        for path in images[:size]:
            key = f"{path.parent.name}-{path.stem}"
            members += [
                (f"{key}.png", path.read_bytes()),
                (f"{key}.cls", label(path.parent.name).encode()),
                (f"{key}.json", b"{}"),
            ]
        images = images[size:]
        write_tar(folder / f"{shard:05}.tar", members)
    return f"{folder}/*.tar"
