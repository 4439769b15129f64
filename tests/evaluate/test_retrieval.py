"""Retrieval in chunks equals the N x N computation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from clip_la.evaluate import retrieval
from clip_la.evaluate.retrieval import retrieval_metrics
from clip_la.evaluate.tally import true_class_positions


def features(count: int, seed: int) -> Tensor:
    """Coarse values, so that scores are exact in float32 and many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, (count, 8), generator=generator).float() / 4


def brute_force_ranks(scores: list[list[float]], own: list[set[int]]) -> list[int]:
    ranks = []
    for row, columns in zip(scores, own, strict=True):
        order = sorted(range(len(row)), key=lambda column: (-row[column], column))
        ranks.append(1 + min(order.index(column) for column in columns))
    return ranks


@pytest.mark.parametrize("scores_at_once", [1, 100, 1 << 20])
def test_equal_to_all_scores_at_once(scores_at_once: int) -> None:
    num_images, num_texts = 23, 61
    images, texts = features(num_images, 0), features(num_texts, 1)
    image_of_text = torch.arange(num_texts) % num_images
    scores = images @ texts.T
    own_texts = [set(torch.where(image_of_text == image)[0].tolist()) for image in range(num_images)]
    expected = {
        "image_to_text": brute_force_ranks(scores.tolist(), own_texts),
        "text_to_image": brute_force_ranks(scores.T.tolist(), [{image} for image in image_of_text.tolist()]),
    }

    metrics = retrieval_metrics(images, texts, image_of_text, scores_at_once=scores_at_once)

    for direction, ranks in expected.items():
        for k in (1, 5, 10):
            assert metrics[f"{direction}_recall@{k}"] == sum(rank <= k for rank in ranks) / len(ranks)
        assert metrics[f"{direction}_mean_rank"] == pytest.approx(sum(ranks) / len(ranks))
        assert metrics[f"{direction}_median_rank"] == torch.tensor(ranks).double().quantile(0.5)
    assert (metrics["num_images"], metrics["num_texts"]) == (num_images, num_texts)


def test_scores_held_at_a_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def record(scores: Tensor, labels: Tensor) -> Tensor:
        sizes.append(scores.numel())
        return true_class_positions(scores, labels)

    monkeypatch.setattr(retrieval, "true_class_positions", record)
    retrieval_metrics(features(50, 0), features(70, 1), torch.arange(70) % 50, scores_at_once=200)
    assert max(sizes) <= 200
    assert sum(sizes) == 2 * 50 * 70


def test_own_features_are_found_first() -> None:
    rows = normalize(torch.randn(300, 16, generator=torch.Generator().manual_seed(0)), dim=1)
    metrics = retrieval_metrics(rows, rows, torch.arange(300), scores_at_once=1000)
    assert metrics["image_to_text_recall@1"] == metrics["text_to_image_recall@1"] == 1
    assert metrics["image_to_text_median_rank"] == metrics["text_to_image_mean_rank"] == 1


@pytest.mark.parametrize(
    ("image_of_text", "message"),
    [
        ([0, 0, 1], "1 of 3 images have no text"),
        ([0, 1, 3], "must name rows of the 3 images"),
        ([0, 1], "found"),
    ],
)
def test_refuses_wrong_pairs(image_of_text: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        retrieval_metrics(features(3, 0), features(3, 1), torch.tensor(image_of_text))


def test_refuses_features_that_are_not_finite() -> None:
    broken = features(3, 0)
    broken[1, 2] = float("nan")
    with pytest.raises(ValueError, match="1 of 3 text features are not finite"):
        retrieval_metrics(features(3, 0), broken, torch.arange(3))
