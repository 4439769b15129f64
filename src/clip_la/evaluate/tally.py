"""Exact counts of a classification: hits, images a class, confusions. Integers until the last division."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from clip_la.evaluate import ranks

_NORMAL_QUANTILE_95 = 1.959963984540054
_TOP = 5


class Answers(NamedTuple):
    """What a model answered for the images of one batch, as plain numbers.

    Attributes:
        batch: number of the batch.
        labels: the true class of each readable image.
        predicted: the class given the highest score.
        positions: how many classes were put before the true one, no more than 5 being counted.
        unreadable: where and why, of each image that could not be read.
    """

    batch: int
    labels: list[int]
    predicted: list[int]
    positions: list[int]
    unreadable: list[str]

    @classmethod
    def of(cls, batch: int, scores: Tensor, labels: Tensor, unreadable: list[str]) -> Answers:
        """Read the answers off the scores.

        Args:
            scores: float32 (n, C), finite.
            labels: int64 (n,), the true classes.
        """
        on_device = labels.to(scores.device)
        positions = true_class_positions(scores, on_device).clamp(max=_TOP)
        predicted, positions = torch.stack((scores.argmax(dim=1), positions)).tolist()
        return cls(batch, labels.tolist(), predicted, positions, unreadable)


@dataclass
class Tally:
    """Counts over images, a class; C classes.

    Attributes:
        num_images, num_top1, num_top5: int64 (C,), by true class.
        confusions: (true class, predicted class) -> images, for wrong predictions only.
        unreadable: path and reason of each image that could not be read; they count nowhere else.
    """

    num_images: Tensor
    num_top1: Tensor
    num_top5: Tensor
    confusions: Counter[tuple[int, int]] = field(default_factory=Counter)
    unreadable: list[str] = field(default_factory=list)

    @classmethod
    def empty(cls, num_classes: int) -> Tally:
        """Nothing counted yet."""
        num_images, num_top1, num_top5 = torch.zeros(3, num_classes, dtype=torch.int64)
        return cls(num_images, num_top1, num_top5)

    def add(self, answers: Answers) -> None:
        """Count a batch."""
        labels, positions = torch.tensor((answers.labels, answers.positions), dtype=torch.int64)
        for counts, chosen in (
            (self.num_images, labels),
            (self.num_top1, labels[positions == 0]),
            (self.num_top5, labels[positions < _TOP]),
        ):
            counts += torch.bincount(chosen, minlength=len(counts))
        triples = zip(answers.labels, answers.predicted, answers.positions, strict=True)
        self.confusions.update((label, predicted) for label, predicted, position in triples if position)
        self.unreadable += answers.unreadable

    def over_ranks(self) -> Tally:
        """The tally of all ranks together, the same on each."""
        counts = torch.stack((self.num_images, self.num_top1, self.num_top5))
        num_images, num_top1, num_top5 = ranks.sum_over_ranks(counts)
        confusions: Counter[tuple[int, int]] = Counter()
        unreadable = []
        for others, failures in ranks.gather_over_ranks((self.confusions, self.unreadable)):
            confusions.update(others)
            unreadable += failures
        return Tally(num_images, num_top1, num_top5, confusions, sorted(unreadable))


def true_class_positions(scores: Tensor, labels: Tensor) -> Tensor:
    """How many classes are put before the true one, int64 (n,): 0 for a correct prediction.

    Of equal scores the class of lower index comes first, so that the result depends on nothing else;
    `torch.topk` promises no order.

    Args:
        scores: (n, C).
        labels: int64 (n,).
    """
    own = scores.gather(1, labels[:, None])
    is_earlier = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]
    return ((scores > own) | ((scores == own) & is_earlier)).sum(dim=1)


def wilson_interval(
    num_successes: int, num_trials: int, z: float = _NORMAL_QUANTILE_95
) -> tuple[float, float]:
    """Wilson's score interval of a proportion; 95 % by default. It never leaves [0, 1].

    Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).

    Raises:
        ValueError: not 0 <= num_successes <= num_trials, or no trial.
    """
    if not 0 <= num_successes <= num_trials or num_trials == 0:
        raise ValueError(f"{num_successes} successes of {num_trials} trials are no proportion")
    p, z2 = num_successes / num_trials, z * z
    centre = p + z2 / (2 * num_trials)
    half_width = z * math.sqrt(p * (1 - p) / num_trials + z2 / (4 * num_trials**2))
    denominator = 1 + z2 / num_trials
    return max(0.0, (centre - half_width) / denominator), min(1.0, (centre + half_width) / denominator)
