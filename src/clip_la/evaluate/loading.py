"""From a source's images to batches, decoded as in training, in any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from clip_la.data.decode import Unusable, decode_image
from clip_la.data.losses import Cause
from clip_la.data.reader import read_ahead
from clip_la.data.spec import Limits
from clip_la.data.transform import BatchTransform
from clip_la.evaluate.images import ImageReader, RawImage
from clip_la.evaluate.ranks import split


class ImageBatch(NamedTuple):
    """The readable images of a batch, and the others.

    Attributes:
        number: of the batch.
        images: float32 (n, 3, height, width).
        places: int64 (n,), where in the list of images they are.
        unreadable: where and why, of each image that could not be read.
    """

    number: int
    images: Tensor
    places: Tensor
    unreadable: list[str]


def num_batches(num_images: int, batch_size: int) -> int:
    """How many batches there are in all."""
    return -(-num_images // batch_size)


def load_batches(
    source: ImageReader,
    numbers: Sequence[int],
    preprocess: Callable[[Image.Image], Tensor],
    *,
    batch_size: int,
    batches: Sequence[int],
    num_workers: int,
) -> Iterable[ImageBatch]:
    """Some of the batches of images.

    Batch b holds the images `numbers[b * batch_size : (b + 1) * batch_size]`, whoever reads it: an image lies
    beside the same others whatever the number of processes, so its feature is the same to the last bit.

    Args:
        numbers: the source's images to use, ascending.
        batches: which batches, ascending.
        num_workers: processes that read and decode; 0 decodes in a thread of this one, a batch ahead.
    """
    loader: DataLoader[Any] = DataLoader(
        _Batches(source, numbers, preprocess, batch_size, batches),
        batch_size=None,
        num_workers=min(num_workers, len(batches)),
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # leaves the training process's own generator alone
    )
    return loader if loader.num_workers else read_ahead(iter(loader))


class _Batches(IterableDataset[ImageBatch]):
    """The batches of whichever process iterates it."""

    def __init__(
        self,
        source: ImageReader,
        numbers: Sequence[int],
        preprocess: Callable[[Image.Image], Tensor],
        batch_size: int,
        batches: Sequence[int],
    ) -> None:
        self._source = source
        self._numbers = numbers
        self._transform = BatchTransform(preprocess)
        self._batch_size = batch_size
        self._batches = batches
        self._limits = Limits()

    def __iter__(self) -> Iterator[ImageBatch]:
        info = get_worker_info()
        batches = split(self._batches, info.id, info.num_workers) if info else self._batches
        raw_images = self._source.read(self._numbers[p] for batch in batches for p in self._places(batch))
        for batch in batches:
            own = self._places(batch)
            yield self._decode(batch, own, islice(raw_images, len(own)))

    def _places(self, batch: int) -> range:
        start = batch * self._batch_size
        return range(start, min(start + self._batch_size, len(self._numbers)))

    def _decode(self, batch: int, places: range, raw_images: Iterable[RawImage]) -> ImageBatch:
        pictures, readable, unreadable = [], [], []
        for place, raw in zip(places, raw_images, strict=True):
            try:
                pictures.append(self._picture(raw))
                readable.append(place)
            except Unusable as error:
                unreadable.append(f"{raw.where}: {error.cause} ({error.detail})")
        images = self._transform.stack(pictures) if pictures else torch.empty(0)
        return ImageBatch(batch, images, torch.tensor(readable, dtype=torch.int64), unreadable)

    def _picture(self, raw: RawImage) -> Tensor:
        if raw.error:
            raise Unusable(Cause.IMAGE_UNREADABLE, raw.error)
        image = decode_image(raw.data, self._limits)
        try:
            return self._transform.first(image)
        except Exception as error:  # as in training, a picture that the transform can't take is counted
            raise Unusable(Cause.IMAGE_TRANSFORM, repr(error)) from error
