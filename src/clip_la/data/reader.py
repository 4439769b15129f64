"""One reader's work: raw samples ahead of time in blocks, then decoded, seeded and batched."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from queue import Queue
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from clip_la.data.captions import CaptionEncoder
from clip_la.data.decode import Unusable, decode_image
from clip_la.data.losses import Cause, Loss, LossCounter
from clip_la.data.order import Position, Reader
from clip_la.data.samples import RawSample
from clip_la.data.source import Source
from clip_la.data.spec import DataSpec
from clip_la.data.transform import BatchTransform, Preprocess

T = TypeVar("T")


@dataclass
class Block:
    """Raw samples that are shuffled together, and what was lost on the way to them."""

    position: Position
    samples: list[RawSample] = field(default_factory=list)
    losses: LossCounter = field(default_factory=LossCounter)


@dataclass
class ReaderBatch:
    """What a reader hands on: a batch, or the counts of a full pass without one (images is None)."""

    images: torch.Tensor | None
    texts: torch.Tensor | None
    position: Position
    losses: LossCounter

    def pin_memory(self) -> ReaderBatch:
        """The same in page-locked memory; DataLoader calls this where pinning is on."""
        if self.images is None or self.texts is None:
            return self
        return replace(self, images=self.images.pin_memory(), texts=self.texts.pin_memory())


class Decoder:
    """Raw samples to tensors, each with its own random numbers."""

    def __init__(
        self, spec: DataSpec, preprocess: Preprocess, tokenize: Callable[[list[str]], torch.Tensor]
    ) -> None:
        self._spec = spec
        self._transform = BatchTransform(preprocess)
        self._encode_caption = CaptionEncoder(tokenize, spec.limits, spec.empty_caption)

    def __call__(self, sample: RawSample, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Picture (3, H, W) float32 and tokens (L,) int64.

        Raises:
            Unusable: either can't be used.
        """
        picture, text = self.decode(sample, seed)
        return self.stack([picture])[0], text

    def stack(self, pictures: Sequence[torch.Tensor]) -> torch.Tensor:
        """(b, 3, H, W) float32 from what `decode` gave for b samples."""
        return self._transform.stack(pictures)

    def decode(self, sample: RawSample, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Picture, as `stack` takes it, and tokens (L,) int64.

        Raises:
            Unusable: either can't be used.
        """
        seed_everything(seed)
        text = self._encode_caption(sample.text)
        image = decode_image(
            sample.image,
            self._spec.limits,
            background=self._spec.background,
            exif_orientation=self._spec.exif_orientation,
        )
        try:
            return self._transform.first(image), text
        except Exception as error:
            raise Unusable(Cause.IMAGE_TRANSFORM, repr(error)) from error


def seed_everything(seed: int) -> None:
    """Seed the CPU generators of torch, random and numpy.

    torch.manual_seed would also queue a call for every CUDA device, and format a stack trace for it.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 - transforms use the global state


@contextmanager
def isolated_random_state() -> Iterator[None]:
    """Give the caller's global generators back as they were."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])  # noqa: NPY002


def isolated(items: Iterator[T]) -> Iterator[T]:
    """The same items, whose making leaves the caller's global generators alone."""
    while True:
        with isolated_random_state():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


class BatchReader:
    """Endless batches of one reader in one virtual epoch.

    Each pass over the reader's share is cut into whole batches and its rest dropped, so that no batch
    holds a sample twice. A share that gives no batch is followed by a pass over all units.
    """

    def __init__(
        self,
        source: Source,
        decoder: Decoder,
        spec: DataSpec,
        reader: Reader,
        weights: Sequence[float] | None = None,
    ) -> None:
        self._source = source
        self._decoder = decoder
        self._spec = spec
        self._reader = reader
        self._weights = weights
        self._losses = LossCounter()

    def batches(self, position: Position) -> Iterator[ReaderBatch]:
        """Batches from `position` on; after a pass over all units without one, an item without images."""
        while True:
            gave_batch = position.num_batches > 0
            plan = self._reader.plan(len(self._source), position, self._weights, self._spec.resampled)
            for batch in self._read_pass(plan, position):
                gave_batch = True
                yield batch
            if gave_batch:
                position = Position(pass_number=position.pass_number + 1)
            elif position.is_wide or (self._reader.num_readers == 1 and not self._spec.resampled):
                yield ReaderBatch(None, None, position, self._losses)
                return
            else:
                self._losses = LossCounter()  # the wide pass meets the same losses again
                position = Position(pass_number=position.pass_number, is_wide=True)

    def _read_pass(self, plan: npt.NDArray[np.int64], position: Position) -> Iterator[ReaderBatch]:
        images: list[torch.Tensor] = []
        texts: list[torch.Tensor] = []
        num_batches = position.num_batches
        for place, sample in self._shuffled_samples(plan, position):
            try:
                image, text = self._decoder.decode(sample, self._reader.sample_seed(place))
            except Unusable as error:
                self._losses.add(Loss(error.cause, sample.shard, sample.key, error.detail))
                continue
            images.append(image)
            texts.append(text)
            if len(images) == self._spec.batch_size:
                num_batches += 1
                after = replace(place, offset=place.offset + 1, num_batches=num_batches)
                losses, self._losses = self._losses, LossCounter()
                yield ReaderBatch(self._decoder.stack(images), torch.stack(texts), after, losses)
                images, texts = [], []

    def _shuffled_samples(
        self, plan: npt.NDArray[np.int64], position: Position
    ) -> Iterator[tuple[Position, RawSample]]:
        with closing(read_ahead(read_blocks(self._source, plan, self._spec, position))) as blocks:
            for block in blocks:
                start = block.position
                if not start.offset:  # otherwise counted before the resume
                    self._losses.merge(block.losses)
                order = self._reader.shuffle(len(block.samples), start)
                for offset in range(start.offset, len(order)):
                    yield replace(start, offset=offset), block.samples[order[offset]]


def read_blocks(
    source: Source, plan: npt.NDArray[np.int64], spec: DataSpec, position: Position
) -> Iterator[Block]:
    """The blocks of a pass from the one at `position` on."""
    block, num_bytes = Block(position), 0
    for unit in range(position.unit, len(plan)):
        num_skipped = position.sample if unit == position.unit else 0
        num_samples = 0
        for item in source.read(int(plan[unit])):
            if isinstance(item, Loss):
                if num_samples >= num_skipped:
                    block.losses.add(item)
                continue
            num_samples += 1
            if num_samples <= num_skipped:
                continue
            block.samples.append(item)
            num_bytes += item.num_bytes
            if len(block.samples) == spec.shuffle_block or num_bytes >= spec.shuffle_bytes:
                yield block
                number = block.position.block + 1
                start = replace(position, unit=unit, sample=num_samples, block=number, offset=0)
                block, num_bytes = Block(start), 0
    yield block


def read_ahead(items: Generator[T, None, None] | Iterator[T]) -> Generator[T, None, None]:
    """The same items, each made in a background thread while the one before it is in use."""
    permits = threading.Semaphore(1)
    made: Queue[tuple[T | None, BaseException | None]] = Queue()
    is_closed = threading.Event()

    def make() -> None:
        """Make items as permits come; what ends it is handed over too."""
        while permits.acquire() and not is_closed.is_set():
            try:
                made.put((next(items), None))
            except BaseException as error:  # StopIteration too: handed to the consumer
                made.put((None, error))
                return

    threading.Thread(target=make, daemon=True, name="read-ahead").start()
    try:
        while True:
            item, error = made.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            permits.release()
            yield cast(T, item)
    finally:
        is_closed.set()
        permits.release()
