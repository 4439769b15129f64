"""Training batches: endless, the same for the same seed, and exactly resumable.

Worker w of W makes the batches number w, w + W, ... of this rank's stream, and batch `index` of a
virtual epoch belongs to logical reader `index % W`, so which process plays which reader doesn't
matter: a resumed run starts its processes anew and goes on with the same batches.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import logging
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Event
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from clip_la.data.losses import Cause, Loss, LossCounter, describe
from clip_la.data.order import Position, Reader
from clip_la.data.reader import BatchReader, Decoder, ReaderBatch, isolated
from clip_la.data.source import Source, open_units
from clip_la.data.spec import DataSpec
from clip_la.data.tables import Table
from clip_la.data.transform import Preprocess
from clip_la.errors import ExpectedError

STATE_VERSION = 1


class NoUsableSamples(ExpectedError):  # noqa: N818 - named for what happened
    """A full pass over the data gave no batch.

    Attributes:
        counts: losses of that pass by cause.
    """

    def __init__(self, losses: LossCounter, num_units: int, batch_size: int) -> None:
        self.counts = losses.to_counts()
        super().__init__(
            f"a full pass over all {num_units} shards or rows gave fewer than the {batch_size} usable "
            f"samples of one batch; lost: {describe(self.counts, losses.first.values())}\n"
            "see all of it with `clip-la check`"
        )


@dataclass(frozen=True)
class Batch:
    """One batch of this rank.

    Attributes:
        images: (b, 3, H, W) float32.
        texts: (b, L) int64.
        epoch, index: virtual epoch, and number of the batch in it.
        state: what `TrainLoader(state=...)` needs to go on with the next batch; JSON-safe.
        losses: counts by cause, new since the last batch.
        examples: the first loss of each cause not seen before in this run.
    """

    images: torch.Tensor
    texts: torch.Tensor
    epoch: int
    index: int
    state: dict[str, Any]
    losses: dict[str, int]
    examples: tuple[Loss, ...] = ()


class TrainLoader:
    """Endless batches of one rank.

    Args:
        spec: what to read and how.
        preprocess: PIL picture (RGB) -> (3, H, W) float32.
        tokenize: list of n str -> (n, L) int64.
        state: of the last batch of an earlier run; goes on with the one after it. Where the layout
            (world size, workers, batch size, data) has changed since, reading starts at the next
            virtual epoch, with a warning.

    Attributes:
        num_samples: of a virtual epoch, over all ranks; a multiple of the global batch.
        num_batches: of a virtual epoch; the same on every rank.

    Raises:
        ShardListError: nothing to read, or of unknown size.
        ValueError: fewer shards than readers, or too few samples for one batch.
    """

    def __init__(
        self,
        spec: DataSpec,
        preprocess: Preprocess,
        tokenize: Callable[[list[str]], torch.Tensor],
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.spec = spec
        source = open_units(spec)
        _check_readers(spec, len(source), "rows" if isinstance(source, Table) else "shards")
        num_samples = spec.num_samples or source.count_samples()
        global_batch = spec.batch_size * spec.world_size
        if isinstance(source, Table):  # as OpenCLIP: the last partial batch of a table is dropped
            self.num_batches = num_samples // global_batch
        else:
            self.num_batches = math.ceil(num_samples / global_batch)
        if not self.num_batches:
            raise ValueError(
                f"{num_samples} samples an epoch are fewer than one global batch of {global_batch}"
            )
        self.num_samples = self.num_batches * global_batch
        self._num_units = len(source)
        self._layout = _layout(spec, source, self.num_batches)
        self._epoch, self._index, self._positions = self._start(state)
        decoder = Decoder(spec, preprocess, tokenize)
        self._dataset = _ReaderDataset(
            source, decoder, spec, self.num_batches, (self._epoch, self._index, self._positions)
        )

    def _start(self, state: Mapping[str, Any] | None) -> tuple[int, int, list[Position | None]]:
        fresh: list[Position | None] = [None] * self.spec.num_readers
        if state is None:
            return 0, 0, fresh
        if state["version"] != STATE_VERSION:
            raise ValueError(f"data state of version {state['version']}; this release reads {STATE_VERSION}")
        epoch, index = int(state["epoch"]), int(state["index"])
        if index and state["layout"] != self._layout:
            changed = [name for name, value in self._layout.items() if state["layout"].get(name) != value]
            logging.warning(
                "the data can't go on at batch %d of epoch %d because %s changed; starting at epoch %d",
                index, epoch, ", ".join(changed), epoch + 1,
            )  # fmt: skip
            return epoch + 1, 0, fresh
        if not index:
            return epoch, 0, fresh
        return epoch, index, [Position.from_dict(place) if place else None for place in state["positions"]]

    def __iter__(self) -> Generator[Batch, None, None]:
        """Batches from the state on; raises NoUsableSamples after a full pass without one."""
        spec = self.spec
        is_closing = multiprocessing.get_context(spec.start_method).Event()
        loader: DataLoader[ReaderBatch] = DataLoader(
            self._dataset,
            batch_size=None,
            num_workers=spec.workers,
            collate_fn=_unchanged,
            multiprocessing_context=spec.start_method if spec.workers else None,
            worker_init_fn=partial(_start_worker, is_closing),
            generator=torch.Generator(),  # leaves the training process's own generator alone
            pin_memory=spec.pin_memory,
        )
        atexit.register(is_closing.set)  # multiprocessing waits for the workers at exit
        try:
            losses = yield from self._receive(iter(loader), is_closing)
        finally:
            atexit.unregister(is_closing.set)
        # The workers are gone by now; raised inside, the traceback would keep them.
        raise NoUsableSamples(losses, self._num_units, spec.batch_size)

    def _receive(
        self, items: Iterator[ReaderBatch], is_closing: Event
    ) -> Generator[Batch, None, LossCounter]:
        """Batches from the readers' items, until one reports the losses of a pass without any."""
        num_readers = self.spec.num_readers
        epoch, index, positions = self._epoch, self._index, list(self._positions)
        named: set[Cause] = set()
        try:
            for item in items:
                if item.images is None or item.texts is None:
                    return item.losses
                number = epoch, index
                positions[index % num_readers] = item.position
                index += 1
                if index == self.num_batches:
                    epoch, index, positions = epoch + 1, 0, [None] * num_readers
                examples = tuple(loss for cause, loss in item.losses.first.items() if cause not in named)
                named.update(loss.cause for loss in examples)
                state = self._state(epoch, index, positions)
                yield Batch(item.images, item.texts, *number, state, item.losses.to_counts(), examples)
            raise RuntimeError("the data workers ended without a word")
        finally:
            is_closing.set()

    def _state(self, epoch: int, index: int, positions: list[Position | None]) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "layout": self._layout,
            "epoch": epoch,
            "index": index,
            "positions": [place.to_dict() if place else None for place in positions],
        }


class _ReaderDataset(IterableDataset[ReaderBatch]):
    """The batches of whichever worker iterates it."""

    def __init__(
        self,
        source: Source,
        decoder: Decoder,
        spec: DataSpec,
        num_batches: int,
        start: tuple[int, int, list[Position | None]],
    ) -> None:
        self._source = source
        self._weights = source.weights()
        self._decoder = decoder
        self._spec = spec
        self._num_batches = num_batches
        self._start = start

    def __iter__(self) -> Iterator[ReaderBatch]:
        info = get_worker_info()
        return isolated(self._batches(0)) if info is None else self._batches(info.id)

    def _batches(self, worker: int) -> Iterator[ReaderBatch]:
        start_epoch, start_index, positions = self._start
        num_readers = self._spec.num_readers
        epoch = -1
        batches: Iterator[ReaderBatch] = iter(())
        for number in itertools.count(start_index + worker, num_readers):
            epochs, index = divmod(number, self._num_batches)
            if start_epoch + epochs != epoch:
                epoch = start_epoch + epochs
                position = positions[index % num_readers] if not epochs else None
                batches = self._reader(epoch, index % num_readers).batches(position or Position())
            batch = next(batches)
            yield batch
            if batch.images is None:
                return

    def _reader(self, epoch: int, logical_worker: int) -> BatchReader:
        spec = self._spec
        reader = Reader(
            seed=spec.seed,
            epoch=epoch,
            number=spec.rank * spec.num_readers + logical_worker,
            num_readers=spec.world_size * spec.num_readers,
        )
        return BatchReader(self._source, self._decoder, spec, reader, self._weights)


def _check_readers(spec: DataSpec, num_units: int, what: str) -> None:
    num_readers = spec.world_size * spec.num_readers
    if num_units < num_readers and not spec.resampled:
        raise ValueError(
            f"{num_units} {what} can't be shared by {num_readers} readers ({spec.world_size} ranks x "
            f"{spec.num_readers} workers): lower --workers, split the data, or use --dataset-resampled"
        )


def _layout(spec: DataSpec, source: Source, num_batches: int) -> dict[str, Any]:
    """What a position means something for; a change of any of it moves the batches."""
    return {
        "seed": spec.seed,
        "world_size": spec.world_size,
        "workers": spec.num_readers,
        "batch_size": spec.batch_size,
        "num_batches": num_batches,
        "shuffle_block": spec.shuffle_block,
        "shuffle_bytes": spec.shuffle_bytes,
        "resampled": spec.resampled,
        "data": hashlib.sha256(f"{spec.train_data} {len(source)}".encode()).hexdigest()[:16],
    }


def _start_worker(is_closing: Event, worker: int) -> None:
    """Make a worker outlive the signals that a cluster or a terminal sends to every process of a job.

    The training process decides when to stop, after it has saved; SIGTERM ends a worker only once
    the loader is closing, or the training process is gone.
    """
    parent = multiprocessing.parent_process()

    def end_if_closing(*_: object) -> None:
        """End this worker if the loader is closing or the training process is gone."""
        if is_closing.is_set() or parent is None or not parent.is_alive():
            os._exit(0)

    signal.signal(signal.SIGTERM, end_if_closing)
    for ignored in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)


def _unchanged(item: Any) -> Any:
    return item
