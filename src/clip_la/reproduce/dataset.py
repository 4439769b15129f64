"""What the CPU scale trains on and is evaluated with: generated scenes, or shards that a person gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_la.config import ConfigError
from clip_la.data.demo import DemoOptions, build_demo_data
from clip_la.data.source import open_units
from clip_la.data.spec import DataSpec


@dataclass(frozen=True)
class DataSet:
    """Shards to train on and to hold out, and a zero-shot tree if there is one.

    Attributes:
        train, val: shard lists.
        zeroshot, classnames, templates: as `clip-la train` has them.
        description: for people.
    """

    train: str
    val: str
    zeroshot: str | None
    classnames: str | None
    templates: str
    description: str

    @property
    def flags(self) -> Mapping[str, Any]:
        """Settings of `clip-la train`."""
        flags = {
            "train_data": self.train,
            "val_data": self.val,
            "zeroshot": self.zeroshot,
            "classnames": self.classnames,
            "templates": self.templates if self.zeroshot else None,
        }
        return {name: value for name, value in flags.items() if value is not None}


def generated(folder: Path, num_pairs: int) -> DataSet:
    """Scenes of coloured shapes, made in `folder` unless they are there.

    Raises:
        DemoDataError: something else is at `folder`.
    """
    options = DemoOptions(num_pairs=num_pairs)
    build_demo_data(folder, options)
    tree = folder / "zeroshot"
    classnames = tree / "classnames.txt"
    num_classes = len(classnames.read_text(encoding="utf-8").splitlines())
    return DataSet(
        train=str(folder / "train" / "{00000..00007}.tar"),
        val=str(folder / "val" / "00000.tar"),
        zeroshot=str(tree),
        classnames=str(classnames),
        templates="photo",
        description=(
            f"{num_pairs:,} generated scenes of coloured shapes with captions (clip-la demo-data), "
            f"{options.num_val_pairs:,} held out, and a zero-shot tree of {num_classes} colour-shape "
            "combinations that training never shows"
        ),
    )


def given(
    train: str, val: str | None, zeroshot: str | None, classnames: str | None, templates: str
) -> DataSet:
    """A person's own shards.

    Raises:
        ConfigError: no held-out shards, or class names without a zero-shot tree.
    """
    if val is None:
        raise ConfigError("--data needs --val-data: other shards, to measure the loss on")
    if zeroshot is None and classnames is not None:
        raise ConfigError("--classnames belongs to --zeroshot; give both or neither")
    counts = [
        open_units(DataSpec(train_data=shards, batch_size=1)).count_samples() for shards in (train, val)
    ]
    tree = "no zero-shot tree" if zeroshot is None else f"zero-shot on {zeroshot}"
    description = f"{counts[0]:,} pairs of {train}, {counts[1]:,} held out in {val}, {tree}"
    return DataSet(train, val, zeroshot, classnames, templates, description)
