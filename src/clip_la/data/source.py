"""Where raw samples come from: shards or a table, as numbered units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from clip_la.data.losses import Loss
from clip_la.data.samples import RawSample, read_shard
from clip_la.data.spec import DataSpec
from clip_la.data.storage import PIPE
from clip_la.data.tables import Table
from clip_la.data.urls import ShardListError, count_samples, expand_shards, shard_weights

TABLE_SUFFIXES = (".csv", ".tsv")


class Source(Protocol):
    """Numbered units of raw samples."""

    def __len__(self) -> int: ...

    def name(self, unit: int, /) -> str:
        """What people call the unit."""

    def read(self, unit: int, /) -> Iterator[RawSample | Loss]:
        """The samples of one unit, always in the same order."""

    def count_samples(self) -> int:
        """How many samples there should be in all."""

    def weights(self) -> Sequence[float] | None:
        """How often each unit is drawn, relative to the others; None: all alike."""


class Shards:
    """A list of shards; a unit is a shard."""

    def __init__(self, spec: DataSpec) -> None:
        self._spec = spec
        self._urls = tuple(expand_shards(spec.train_data))
        if not spec.allow_pipe and any(url.startswith(PIPE) for url in self._urls):
            raise ShardListError("the shard list would run commands (pipe:), which only a flag permits")

    def __len__(self) -> int:
        return len(self._urls)

    def name(self, unit: int, /) -> str:
        """The shard's URL."""
        return self._urls[unit]

    def read(self, unit: int, /) -> Iterator[RawSample | Loss]:
        """The samples of one shard, in its order."""
        return read_shard(self._urls[unit], self._spec.limits, self._spec.open_options)

    def count_samples(self) -> int:
        """As recorded beside the shards."""
        return count_samples(self._urls, self._spec.open_options)

    def weights(self) -> Sequence[float] | None:
        """The upsampling factors."""
        factors = self._spec.upsampling_factors
        return None if factors is None else shard_weights(self._spec.train_data, factors)


def open_units(spec: DataSpec) -> Shards | Table:
    """The data that a spec names.

    Raises:
        ShardListError, TableError: nothing to read.
    """
    if not is_table(spec):
        return Shards(spec)
    return Table(
        spec.train_data,
        image_key=spec.csv_img_key,
        caption_key=spec.csv_caption_key,
        separator=spec.csv_separator,
        limits=spec.limits,
        options=spec.open_options,
    )


def is_table(spec: DataSpec) -> bool:
    """Whether `train_data` is a CSV or TSV file."""
    if spec.dataset_type == "auto":
        return spec.train_data.lower().endswith(TABLE_SUFFIXES)
    return spec.dataset_type == "csv"
