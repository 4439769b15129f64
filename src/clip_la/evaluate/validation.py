"""Validation on held-out pairs: the contrastive loss at a fixed number of negatives, and retrieval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from clip_la.bundle import ClipBundle
from clip_la.evaluate import ranks
from clip_la.evaluate.features import evaluation_mode, progress, refuse_non_finite
from clip_la.evaluate.retrieval import retrieval_metrics

PairBatches: TypeAlias = Iterable[tuple[Tensor, Tensor, Tensor]]
"""(positions int64 (n,), images float32 (n, 3, height, width), tokens int64 (n, L)) of validation pairs."""

LoadPairs: TypeAlias = Callable[[ClipBundle, int, int], PairBatches]
"""(bundle, rank, world size) -> the rank's share of the pairs, in any order. A pair's position in the whole
set, the same whatever the world size, says where its features belong."""


class ValidationLoss:
    """Evaluator of held-out pairs.

    The loss depends on the number of negatives, so it is taken over blocks of exactly `block_size` pairs, in
    order of their positions, whatever the training batch or the number of ranks: runs can be compared. Pairs
    after the last whole block are left out of it, and counted.

    Args:
        load_pairs: gives a rank's share of the pairs.
        name: of the evaluation.
        block_size: pairs a block: one positive and `block_size - 1` negatives, in both directions.
        num_retrieval: retrieval is measured on the first so many pairs, at most; 0 for none.
    """

    def __init__(
        self,
        load_pairs: LoadPairs,
        *,
        name: str = "validation",
        block_size: int = 256,
        num_retrieval: int = 1000,
    ) -> None:
        if block_size < 2 or num_retrieval < 0:
            raise ValueError(
                f"block_size is {block_size} and num_retrieval {num_retrieval}; expected at least 2 and 0"
            )
        self.name = name
        self._load_pairs = load_pairs
        self._block_size = block_size
        self._num_retrieval = num_retrieval

    def run(self, bundle: ClipBundle) -> dict[str, Any]:
        """`loss` (nats), its standard error over blocks (None for one block), counts, and retrieval metrics.

        Raises:
            ValueError: fewer pairs than one block, or features that are not finite.
            RuntimeError: on all ranks, where it happened on one of several.
        """
        image_features, text_features = self._encode(bundle)
        logit_scale = bundle.model.get_parameter("logit_scale").exp().item()
        losses = block_losses(image_features, text_features, logit_scale, self._block_size)
        first = slice(self._num_retrieval)
        retrieval = (
            retrieval_metrics(
                image_features[first], text_features[first], torch.arange(len(image_features[first]))
            )
            if self._num_retrieval
            else {}
        )
        return {
            "loss": losses.mean().item(),
            "loss_standard_error": standard_error(losses),
            "num_negatives": self._block_size - 1,
            "num_pairs": len(image_features),
            "num_pairs_left_out": len(image_features) - len(losses) * self._block_size,
            **{f"retrieval_{key}": value for key, value in retrieval.items()},
        }

    def _encode(self, bundle: ClipBundle) -> tuple[Tensor, Tensor]:
        """Image and text features of all pairs of all ranks, in order of their positions, on the CPU."""
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        error = None
        try:
            with evaluation_mode(bundle.model):
                for positions, images, tokens in progress(
                    self._load_pairs(bundle, *ranks.rank_and_world_size()), self.name
                ):
                    image_features = refuse_non_finite(bundle.encode_image(images), "image")
                    text_features = refuse_non_finite(bundle.encode_text(tokens), "text")
                    parts.append((positions, image_features.cpu(), text_features.cpu()))
        except Exception as caught:
            error = caught
        ranks.raise_on_all_ranks(error)
        everything = [part for share in ranks.gather_over_ranks(parts) for part in share]
        if not everything:
            raise ValueError(f"{self.name}: no usable pair")
        positions, image_features, text_features = (
            torch.cat(column) for column in zip(*everything, strict=True)
        )
        order = positions.argsort()
        return image_features[order], text_features[order]


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
