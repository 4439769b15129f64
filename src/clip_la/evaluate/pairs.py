"""Held-out pairs of shards or of a table, in their own order, shared by ranks and workers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from clip_la.bundle import ClipBundle
from clip_la.data.decode import Unusable
from clip_la.data.losses import Loss, LossCounter
from clip_la.data.reader import Decoder, isolated
from clip_la.data.samples import RawSample
from clip_la.data.source import Source, open_units
from clip_la.data.spec import DataSpec
from clip_la.data.tables import Table


class PairBatch(NamedTuple):
    """Some of a reader's pairs; a reader's last batch may hold none.

    Attributes:
        positions: int64 (n,), places in the whole set, the same whatever the number of readers.
        images: float32 (n, 3, height, width).
        tokens: int64 (n, L).
        losses: what could not be used since the last batch.
    """

    positions: Tensor
    images: Tensor
    tokens: Tensor
    losses: LossCounter


class HeldOutPairs:
    """The first `spec.num_samples` pairs (or all) of `spec.train_data`, each read once, unshuffled.

    Every reader runs through the shards and decodes its share of the samples, one in so many, so that few
    shards still keep many readers busy. Of a table, a reader opens only the images of its rows.

    Raises:
        ShardListError, TableError: nothing to read.
    """

    def __init__(self, spec: DataSpec) -> None:
        self._spec = spec
        self._source = open_units(spec)
        self._limit = sys.maxsize if spec.num_samples is None else spec.num_samples

    def load(self, bundle: ClipBundle, rank: int, world_size: int) -> Iterable[PairBatch]:
        """One rank's share, in batches of at most `spec.batch_size`."""
        decoder = Decoder(self._spec, bundle.preprocess_val, bundle.tokenizer)
        loader: DataLoader[Any] = DataLoader(
            _Share(self._source, self._limit, decoder, self._spec, rank, world_size),
            batch_size=None,
            num_workers=self._spec.workers,
            collate_fn=_unchanged,
            multiprocessing_context=self._spec.start_method if self._spec.workers else None,
            generator=torch.Generator(),  # leaves the training process's own generator alone
        )
        return loader


class _Share(IterableDataset[PairBatch]):
    """The pairs of whichever reader iterates it."""

    def __init__(
        self, source: Source, limit: int, decoder: Decoder, spec: DataSpec, rank: int, world_size: int
    ) -> None:
        self._source = source
        self._limit = limit
        self._decoder = decoder
        self._batch_size = spec.batch_size
        self._first_reader = rank * spec.num_readers
        self._num_readers = world_size * spec.num_readers

    def __iter__(self) -> Iterator[PairBatch]:
        info = get_worker_info()
        batches = self._batches(self._first_reader + (info.id if info else 0))
        return isolated(batches)

    def _batches(self, reader: int) -> Iterator[PairBatch]:
        pairs: list[tuple[int, Tensor, Tensor]] = []
        losses = LossCounter()
        for item in read_share(self._source, reader, self._num_readers, self._limit):
            if isinstance(item, Loss):
                losses.add(item)
                continue
            position, sample = item
            try:
                pairs.append((position, *self._decoder(sample, seed=position)))
            except Unusable as error:
                losses.add(Loss(error.cause, sample.shard, sample.key, error.detail))
            if len(pairs) == self._batch_size:
                yield _collate(pairs, losses)
                pairs, losses = [], LossCounter()
        yield _collate(pairs, losses)


def read_share(
    source: Source, reader: int, num_readers: int, limit: int
) -> Iterator[tuple[int, RawSample] | Loss]:
    """(position, sample) of every `num_readers`-th of the first `limit` samples, and each loss once."""
    if isinstance(source, Table):
        for row in range(reader, min(limit, len(source)), num_readers):
            for item in source.read(row):
                yield item if isinstance(item, Loss) else (row, item)
        return
    position = 0
    for unit in range(len(source)):
        for item in source.read(unit):
            if isinstance(item, Loss):
                if reader == 0:
                    yield item
                continue
            if position == limit:
                return
            if position % num_readers == reader:
                yield position, item
            position += 1


def _collate(pairs: list[tuple[int, Tensor, Tensor]], losses: LossCounter) -> PairBatch:
    if not pairs:
        nothing = torch.empty(0, dtype=torch.int64)
        return PairBatch(nothing, nothing, nothing, losses)
    positions, images, tokens = zip(*pairs, strict=True)
    return PairBatch(torch.tensor(positions), torch.stack(images), torch.stack(tokens), losses)


def _unchanged(item: Any) -> Any:
    return item
