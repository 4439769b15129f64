"""Image-text retrieval over captioned images (COCO, Flickr30k), shared by all ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clip_la.bundle import ClipBundle
from clip_la.data.losses import printable
from clip_la.evaluate import ranks
from clip_la.evaluate.captions import load_captioned_images
from clip_la.evaluate.features import evaluation_mode, progress, refuse_non_finite
from clip_la.evaluate.loading import load_batches, num_batches
from clip_la.evaluate.retrieval import retrieval_metrics
from clip_la.evaluate.shards import name_of

_logger = logging.getLogger(__name__)
_MAX_EXAMPLES = 5
_CAPTIONS_AT_ONCE = 256


class CaptionRetrieval:
    """Evaluator of captioned images: recall and ranks in both directions, see `retrieval_metrics`.

    Args:
        data: a caption file or shards, see `clip_la.evaluate.captions`.
        images: folder to which a file's image names are relative; by default the file's own.
        split: of a Karpathy file.
        batch_size: images a batch, a rank.
        workers: processes that decode images, a rank; 0 decodes in this one.
        name: of the evaluation; by default "retrieval/<file or folder name>".

    Raises:
        ValueError: the data can't be used.
        RanksError: on all ranks, where it happened on one of several.
    """

    def __init__(
        self,
        data: str | Path,
        *,
        images: str | Path | None = None,
        split: str = "test",
        batch_size: int = 64,
        workers: int = 2,
        name: str | None = None,
    ) -> None:
        if batch_size < 1 or workers < 0:
            raise ValueError(f"batch_size is {batch_size} and workers {workers}; expected at least 1 and 0")
        self.name = name or f"retrieval/{name_of(str(data))}"
        self.set = load_captioned_images(data, images=images, split=split)
        self._batch_size = batch_size
        self._workers = workers

    def run(self, bundle: ClipBundle) -> dict[str, Any]:
        """The metrics of `retrieval_metrics`, and counts. Captions of unreadable images are left out.

        Raises:
            ValueError: no image could be read, or features that are not finite.
            RanksError: on all ranks, where it happened on one of several.
        """
        places, image_features, unreadable = self._encode_images(bundle)
        unreadable = [*self.set.unusable, *unreadable]
        self._report(unreadable)
        if not len(places):
            raise ValueError(f"{self.name}: none of the {self.set.num_images} images could be read")
        row_of = torch.full((self.set.num_images,), -1)
        row_of[places] = torch.arange(len(places))
        rows = row_of[torch.tensor(self.set.image_of)]
        kept = torch.nonzero(rows >= 0).flatten()
        text_features = self._encode_captions(bundle, [self.set.captions[index] for index in kept.tolist()])
        return {
            **retrieval_metrics(
                image_features.to(bundle.device), text_features.to(bundle.device), rows[kept]
            ),
            "num_unreadable": len(unreadable),
            "num_captions_left_out": len(rows) - len(kept),
        }

    def _encode_images(self, bundle: ClipBundle) -> tuple[Tensor, Tensor, list[str]]:
        """Numbers of the readable images, ascending, their features, and what could not be read."""
        with ranks.failing_together(), evaluation_mode(bundle.model):
            share = self._encode_share(bundle)
        parts, unreadable = [], []
        for own_parts, own_unreadable in ranks.gather_over_ranks(share):
            parts += own_parts
            unreadable += own_unreadable
        if not parts:
            return torch.empty(0, dtype=torch.int64), torch.empty(0), unreadable
        places, features = (torch.cat(column) for column in zip(*parts, strict=True))
        return places, features, unreadable

    @torch.inference_mode()
    def _encode_share(self, bundle: ClipBundle) -> tuple[list[tuple[Tensor, Tensor]], list[str]]:
        total = num_batches(self.set.num_images, self._batch_size)
        todo = ranks.split(range(total), *ranks.rank_and_world_size())
        batches = load_batches(
            self.set.images,
            range(self.set.num_images),
            bundle.preprocess_val,
            batch_size=self._batch_size,
            batches=todo,
            num_workers=self._workers,
        )
        parts, unreadable = [], []
        for batch in progress(batches, self.name, total=len(todo)):
            unreadable += batch.unreadable
            if len(batch.places):
                features = refuse_non_finite(bundle.encode_image(batch.images), "image")
                parts.append((batch.places, features.cpu()))
        return parts, unreadable

    def _encode_captions(self, bundle: ClipBundle, captions: Sequence[str]) -> Tensor:
        starts = range(0, len(captions), _CAPTIONS_AT_ONCE)
        with ranks.failing_together(), evaluation_mode(bundle.model):
            parts = [
                _encode(bundle, captions[start : start + _CAPTIONS_AT_ONCE])
                for start in progress(ranks.share(starts), "captions")
            ]
        return torch.cat(ranks.interleave(ranks.gather_over_ranks(parts), len(starts)))

    def _report(self, unreadable: Sequence[str]) -> None:
        if unreadable and ranks.rank_and_world_size()[0] == 0:
            examples = "\n  ".join(printable(example) for example in unreadable[:_MAX_EXAMPLES])
            _logger.warning("%s: %d things could not be used:\n  %s", self.name, len(unreadable), examples)


@torch.inference_mode()
def _encode(bundle: ClipBundle, captions: Sequence[str]) -> Tensor:
    return refuse_non_finite(bundle.encode_text(bundle.tokenizer(list(captions))), "text").cpu()
