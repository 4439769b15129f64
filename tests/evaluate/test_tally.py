"""Counting: against brute force, with ties, and Wilson's interval against its published form."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clip_la.evaluate.tally import Answers, Tally, true_class_positions, wilson_interval


def brute_force_position(scores: list[float], label: int) -> int:
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return order.index(label)


@pytest.mark.parametrize("num_classes", [1, 2, 4, 5, 30])
def test_counts_equal_brute_force_with_many_ties(num_classes: int) -> None:
    generator = torch.Generator().manual_seed(num_classes)
    scores = torch.randint(0, 4, (200, num_classes), generator=generator).float()
    labels = torch.randint(0, num_classes, (200,), generator=generator)
    positions = [
        brute_force_position(row, label) for row, label in zip(scores.tolist(), labels.tolist(), strict=True)
    ]
    assert true_class_positions(scores, labels).tolist() == positions

    tally = Tally.empty(num_classes)
    for part in torch.arange(200).split(33):
        tally.add(Answers.of(0, scores[part], labels[part], []))
    for label in range(num_classes):
        own = [position for position, other in zip(positions, labels.tolist(), strict=True) if other == label]
        assert tally.num_images[label] == len(own)
        assert tally.num_top1[label] == own.count(0)
        assert tally.num_top5[label] == sum(position < 5 for position in own)
    assert tally.confusions.total() == 200 - positions.count(0)


def test_confusions_name_the_predicted_class() -> None:
    tally = Tally.empty(3)
    scores = torch.tensor([[0.0, 0.1, 0.9], [0.0, 0.1, 0.9], [0.5, 0.5, 0.0]])
    tally.add(Answers.of(0, scores, torch.tensor([0, 0, 1]), []))
    assert tally.confusions == {(0, 2): 2, (1, 0): 1}


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (10, 10), (1, 1), (137, 250), (500, 1000)])
def test_wilson_bounds_solve_the_score_equation(successes: int, trials: int) -> None:
    z = 1.959963984540054
    share = successes / trials
    # The bounds are the roots of (share - p)^2 = z^2 p (1 - p) / n.
    roots = np.roots([1 + z**2 / trials, -(2 * share + z**2 / trials), share**2]).real
    assert wilson_interval(successes, trials) == pytest.approx(sorted(roots.clip(0, 1)), abs=1e-7)


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_what_is_no_proportion(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="no proportion"):
        wilson_interval(successes, trials)
