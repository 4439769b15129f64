"""Image-text retrieval: recall at k and ranks in both directions, in memory linear in the number of pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from clip_la.evaluate import ranks
from clip_la.evaluate.features import refuse_non_finite
from clip_la.evaluate.tally import true_class_positions

_SCORES_AT_ONCE = 1 << 24
"""Scores held at a time: 64 MiB in float32; with what is compared, at most 0.75 GiB was seen for any N."""


def retrieval_metrics(
    image_features: Tensor,
    text_features: Tensor,
    image_of_text: Tensor,
    *,
    recall_at: Sequence[int] = (1, 5, 10),
    scores_at_once: int = _SCORES_AT_ONCE,
) -> dict[str, Any]:
    """How well images find their texts and texts their image, by the features' dot products.

    An image may have many texts; it has found them when the best of its own is found. Ranks count from 1.
    Of equal scores the one of lower index comes first. The N x N scores are computed a few rows at a time,
    by all ranks together.

    Args:
        image_features: float32 (N, E), L2-normalised.
        text_features: float32 (M, E), L2-normalised.
        image_of_text: int64 (M,), the row of each text's image.
        recall_at: the k of recall@k.
        scores_at_once: bound on the scores held at a time; at least one row is.

    Returns:
        `image_to_text_recall@k`, `..._mean_rank`, `..._median_rank`, the same for `text_to_image`, and the
        numbers of images and texts.

    Raises:
        ValueError: shapes that don't fit, an image without a text, or features that are not finite.
    """
    _check_pairs(image_features, text_features, image_of_text)
    image_of_text = image_of_text.to(image_features.device)
    image_places = _ranks(image_features, text_features, _best_own_text(image_of_text), scores_at_once)
    text_places = _ranks(text_features, image_features, lambda _, rows: image_of_text[rows], scores_at_once)
    return {
        **_summary("image_to_text", image_places, recall_at),
        **_summary("text_to_image", text_places, recall_at),
        "num_images": len(image_features),
        "num_texts": len(text_features),
    }


def _check_pairs(image_features: Tensor, text_features: Tensor, image_of_text: Tensor) -> None:
    num_images, num_texts = len(image_features), len(text_features)
    if image_features.shape[1:] != text_features.shape[1:] or image_of_text.shape != (num_texts,):
        raise ValueError(
            f"expected features (N, E) and (M, E) and M image rows; found {tuple(image_features.shape)}, "
            f"{tuple(text_features.shape)} and {tuple(image_of_text.shape)}"
        )
    if not num_images or not num_texts or not 0 <= image_of_text.min() <= image_of_text.max() < num_images:
        raise ValueError(f"image_of_text must name rows of the {num_images} images, for {num_texts} texts")
    num_without = num_images - len(torch.unique(image_of_text))
    if num_without:
        raise ValueError(f"{num_without} of {num_images} images have no text; leave them out")
    refuse_non_finite(image_features, "image")
    refuse_non_finite(text_features, "text")


_Target = Callable[[Tensor, Tensor], Tensor]
"""(scores of some queries (n, M), their rows (n,)) -> the column that each should find (n,)."""


def _best_own_text(image_of_text: Tensor) -> _Target:
    def target(scores: Tensor, rows: Tensor) -> Tensor:
        """The best scored of each row's own texts."""
        is_own = image_of_text == rows[:, None]
        return scores.masked_fill(~is_own, float("-inf")).argmax(dim=1)

    return target


def _ranks(queries: Tensor, candidates: Tensor, target: _Target, scores_at_once: int) -> Tensor:
    """The rank, from 1, of each query's target among the candidates, int64 (queries,), on the CPU.

    Each rank of `torch.distributed` takes some of the blocks, which are the same for any number of ranks.
    """
    num_rows = max(1, scores_at_once // len(candidates))
    blocks = torch.split(torch.arange(len(queries), device=queries.device), num_rows)
    with ranks.failing_together():
        parts = []
        for rows in ranks.share(blocks):
            scores = queries[rows] @ candidates.T
            parts.append((true_class_positions(scores, target(scores, rows)) + 1).cpu())
    return torch.cat(ranks.interleave(ranks.gather_over_ranks(parts), len(blocks)))


def _summary(direction: str, places: Tensor, recall_at: Sequence[int]) -> dict[str, float]:
    recalls = {f"{direction}_recall@{k}": int((places <= k).sum()) / len(places) for k in recall_at}
    return {
        **recalls,
        f"{direction}_mean_rank": places.double().mean().item(),
        f"{direction}_median_rank": places.double().quantile(0.5).item(),
    }
