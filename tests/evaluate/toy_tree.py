"""Small image-folder trees for tests."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

from PIL import Image


def make_tree(root: Path, counts: Mapping[str, int], seed: int = 0) -> Path:
    """Folders of one-colour PNGs, random but for the seed, and a class-name file inside the tree.

    The class file has the folders' names with `_` and `-` as spaces, lower case, in reverse order.
    """
    rng = random.Random(seed)
    for folder, count in counts.items():
        (root / folder).mkdir(parents=True)
        for index in range(count):
            colour = tuple(rng.randrange(256) for _ in range(3))
            Image.new("RGB", (8, 8), colour).save(root / folder / f"{index:03}.png")
    names = [folder.lower().replace("_", " ").replace("-", " ") for folder in reversed(counts)]
    (root / "classnames.txt").write_text("\n".join(names))
    return root
