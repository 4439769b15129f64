"""Validation on held-out pairs: the contrastive loss at a fixed number of negatives, and retrieval."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from clip_la.bundle import ClipBundle
from clip_la.data.losses import LossCounter, describe
from clip_la.data.spec import DataSpec
from clip_la.evaluate import ranks
from clip_la.evaluate.features import evaluation_mode, progress, refuse_non_finite
from clip_la.evaluate.pairs import HeldOutPairs, PairBatch
from clip_la.evaluate.retrieval import retrieval_metrics

_logger = logging.getLogger(__name__)
_Features = tuple[Tensor, Tensor, Tensor]
"""Positions int64 (n,), image and text features float32 (n, E), on the CPU."""


class ValidationLoss:
    """Evaluator of held-out pairs.

    The loss depends on the number of negatives, so it is taken over blocks of exactly `block_size` pairs, in
    the data's order, whatever the training batch or the number of ranks: runs can be compared. Pairs after
    the last whole block are left out of it, and counted.

    Args:
        data: the pairs, see `HeldOutPairs`; rank and world size are those of the run.
        name: of the evaluation.
        block_size: pairs a block: one positive and `block_size - 1` negatives, in both directions.
        num_retrieval: retrieval is measured on the first so many pairs, at most; 0 for none.

    Raises:
        ValueError: nothing to read (a ShardListError or TableError), or sizes that are too small.
    """

    def __init__(
        self, data: DataSpec, *, name: str = "validation", block_size: int = 256, num_retrieval: int = 1000
    ) -> None:
        if block_size < 2 or num_retrieval < 0:
            raise ValueError(
                f"block_size is {block_size} and num_retrieval {num_retrieval}; expected at least 2 and 0"
            )
        self.name = name
        self._pairs = HeldOutPairs(data)
        self._block_size = block_size
        self._num_retrieval = num_retrieval

    def run(self, bundle: ClipBundle) -> dict[str, Any]:
        """`loss` (nats), its standard error over blocks (None for one block), counts, and retrieval metrics.

        Raises:
            ValueError: fewer usable pairs than one block, or features that are not finite.
            RuntimeError: on all ranks, where it happened on one of several.
        """
        image_features, text_features, num_unusable = self._encode_all(bundle)
        num_pairs, num_retrieval = len(image_features), min(len(image_features), self._num_retrieval)
        logit_scale = bundle.model.get_parameter("logit_scale").exp().item()
        losses = block_losses(image_features, text_features, logit_scale, self._block_size)
        metrics = {
            "loss": losses.mean().item(),
            "loss_standard_error": standard_error(losses),
            "num_negatives": self._block_size - 1,
            "num_pairs": num_pairs,
            "num_pairs_left_out": num_pairs - len(losses) * self._block_size,
            "num_unusable": num_unusable,
        }
        if num_retrieval:
            first = image_features[:num_retrieval], text_features[:num_retrieval]
            metrics |= retrieval_metrics(*first, torch.arange(num_retrieval))
        return metrics

    def _encode_all(self, bundle: ClipBundle) -> tuple[Tensor, Tensor, int]:
        """Image and text features of all ranks' pairs, in the data's order, and the number of losses."""
        with ranks.failing_together(), evaluation_mode(bundle.model):
            parts, losses = self._encode_share(bundle)
        shares = ranks.gather_over_ranks((parts, losses))
        losses = LossCounter()
        for _, share_losses in shares:
            losses.merge(share_losses)
        summary = describe(losses.to_counts(), losses.first.values())
        if losses and ranks.rank_and_world_size()[0] == 0:
            _logger.warning("%s: lost %s", self.name, summary)
        columns = list(zip(*(part for share_parts, _ in shares for part in share_parts), strict=True))
        if not columns:
            raise ValueError(f"{self.name}: no usable pair; lost {summary}")
        positions, image_features, text_features = map(torch.cat, columns)
        order = positions.argsort()
        return image_features[order], text_features[order], len(losses)

    def _encode_share(self, bundle: ClipBundle) -> tuple[list[_Features], LossCounter]:
        parts, losses = [], LossCounter()
        for batch in progress(self._pairs.load(bundle, *ranks.rank_and_world_size()), self.name):
            losses.merge(batch.losses)
            if len(batch.positions):
                parts.append(_encode(bundle, batch))
        return parts, losses


def _encode(bundle: ClipBundle, batch: PairBatch) -> _Features:
    image_features = refuse_non_finite(bundle.encode_image(batch.images), "image")
    text_features = refuse_non_finite(bundle.encode_text(batch.tokens), "text")
    return batch.positions, image_features.cpu(), text_features.cpu()


def block_losses(
    image_features: Tensor, text_features: Tensor, logit_scale: float, block_size: int
) -> Tensor:
    """CLIP's loss (InfoNCE, both directions, nats) of each whole block of pairs, float32 (blocks,).

    Args:
        image_features, text_features: float32 (N, E), L2-normalised; row i belongs to row i.
        logit_scale: the factor on the dot products, exp of the model's parameter.
        block_size: pairs a block.

    Raises:
        ValueError: fewer than `block_size` pairs.
    """
    num_blocks = len(image_features) // block_size
    if num_blocks == 0:
        raise ValueError(
            f"{len(image_features)} validation pairs are fewer than a block of {block_size}; "
            "give more pairs or a smaller block size"
        )
    targets = torch.arange(block_size, device=image_features.device)
    losses = []
    for index in range(num_blocks):
        block = slice(index * block_size, (index + 1) * block_size)
        scores = logit_scale * image_features[block] @ text_features[block].T
        losses.append((F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2)
    return torch.stack(losses)


def standard_error(values: Tensor) -> float | None:
    """The standard error of the mean of independent values; None for fewer than two."""
    return values.std().item() / math.sqrt(len(values)) if len(values) > 1 else None
