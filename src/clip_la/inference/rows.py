"""From raw samples to what the towers take, in order: decoded ahead of their use by a few threads."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from clip_la.bundle import ClipBundle
from clip_la.data.captions import decode_caption
from clip_la.data.decode import Unusable, decode_image
from clip_la.data.losses import Cause, Loss
from clip_la.data.samples import RawSample
from clip_la.data.spec import Limits
from clip_la.data.transform import BatchTransform
from clip_la.inference.sources import Units


class Position(NamedTuple):
    """Where reading goes on: the unit, and how many of its items are done with."""

    unit: int = 0
    item: int = 0


@dataclass(frozen=True)
class Row:
    """One sample, ready to be embedded.

    Attributes:
        picture: as `BatchTransform.stack` takes it; None where images aren't embedded.
        caption: None where there is none.
        metadata: a value for each of the source's columns.
    """

    picture: torch.Tensor | None
    caption: str | None
    metadata: dict[str, Any]


class RowReader:
    """Rows of a source.

    Args:
        units: the source.
        bundle: whose image preprocessing is used.
        with_images: decode images.
        with_captions: a row needs a caption.
        workers: threads that decode.
    """

    def __init__(
        self, units: Units, bundle: ClipBundle, *, with_images: bool, with_captions: bool, workers: int
    ) -> None:
        self._units = units
        self._transform = BatchTransform(bundle.preprocess_val)
        self._with_images = with_images
        self._with_captions = with_captions
        self._workers = max(1, workers)
        self._limits = Limits()

    def stack(self, rows: list[Row]) -> torch.Tensor:
        """The pictures of rows, (n, 3, height, width) float32."""
        return self._transform.stack([row.picture for row in rows if row.picture is not None])

    def rows(self, start: Position) -> Iterator[tuple[Position, Row | Loss]]:
        """Every item from `start` on, with the position after it."""
        waiting: deque[tuple[Position, Future[Row | Loss]]] = deque()
        with ThreadPoolExecutor(self._workers, "decode") as pool:
            try:
                for position, item in self._items(start):
                    waiting.append((position, pool.submit(self._row, item)))
                    if len(waiting) > 4 * self._workers:
                        yield _result(waiting.popleft())
                while waiting:
                    yield _result(waiting.popleft())
            finally:
                for _, future in waiting:
                    future.cancel()

    def _items(self, start: Position) -> Iterator[tuple[Position, RawSample | Loss]]:
        for unit in range(start.unit, len(self._units)):
            num_done = start.item if unit == start.unit else 0
            for number, item in enumerate(self._units.read(unit), start=1):
                if number > num_done:
                    yield Position(unit, number), item

    def _row(self, item: RawSample | Loss) -> Row | Loss:
        if isinstance(item, Loss):
            return item
        try:
            caption = self._caption(item.text)
            picture = self._picture(item.image) if self._with_images else None
        except Unusable as error:
            return Loss(error.cause, item.shard or self._units.name, item.key, error.detail)
        return Row(picture, caption, self._metadata(item))

    def _picture(self, data: bytes) -> torch.Tensor:
        image = decode_image(data, self._limits)
        try:
            return self._transform.first(image)
        except Exception as error:  # as in training, a picture that the transform can't take is counted
            raise Unusable(Cause.IMAGE_TRANSFORM, repr(error)) from error

    def _caption(self, text: bytes) -> str | None:
        try:
            caption = decode_caption(text).strip()
        except Unusable:
            if self._with_captions:
                raise
            return None
        if self._with_captions and not caption:
            raise Unusable(Cause.TEXT_EMPTY, "no caption")
        return caption[: self._limits.caption_chars] or None

    def _metadata(self, item: RawSample) -> dict[str, Any]:
        metadata = item.metadata.decode("utf-8", "replace")
        known = {
            "image_path": os.fsencode(item.key).decode("utf-8", "backslashreplace"),
            "shard": item.shard,
            "url": _url(metadata),
            "json": metadata or None,
            "line": item.key,
        }
        return {column: known[column] for column in self._units.columns}


def _result(waiting: tuple[Position, Future[Row | Loss]]) -> tuple[Position, Row | Loss]:
    return waiting[0], waiting[1].result()


def _url(metadata: str) -> str | None:
    """What img2dataset's .json says of where the image is from."""
    try:
        url = json.loads(metadata)["url"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    return url if isinstance(url, str) else None
