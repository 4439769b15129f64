"""How the scaling law of one kind of model stands to that of another, in numbers and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clip_la.report.fit import FEW_SIZES, FloatArray, Interval, PowerLaw, log_losses, tails
from clip_la.report.text import count

BEYOND = 10.0
"""How far beyond the largest size the laws are compared too."""


@dataclass(frozen=True)
class Ratio:
    """A second law's value over a first's, with its bootstrap interval."""

    value: float
    interval: Interval


@dataclass(frozen=True)
class Prediction:
    """The ratio of two laws' losses at one size; `is_beyond` the sizes that both were fitted on."""

    size: float
    ratio: Ratio
    is_beyond: bool


@dataclass(frozen=True)
class LawComparison:
    """How a second law stands to a first: L2(N) / L1(N), b2 - b1, and the ratios of a and of b.

    Attributes:
        predictions: at the ends of the sizes that both saw, at the sizes asked for, and at ten times the
            largest, in order of size.
        few_sizes: a law has so few sizes that the intervals are too narrow to conclude from.
    """

    predictions: tuple[Prediction, ...]
    a_ratio: Ratio
    b_ratio: Ratio
    exponent_difference: float
    exponent_interval: Interval
    few_sizes: bool

    @property
    def verdict(self) -> str:
        """What the points say about the two exponents being the same."""
        if self.exponent_interval[0] <= 0 <= self.exponent_interval[1]:
            return "the points don't tell the exponents apart"
        if self.few_sizes:
            return "the exponents look different, but the sizes are too few to be sure"
        return "the points tell the exponents apart"

    @property
    def within(self) -> tuple[Prediction, Prediction]:
        """The predictions at the ends of the sizes that both saw."""
        inside = [prediction for prediction in self.predictions if not prediction.is_beyond]
        return inside[0], inside[-1]

    def sentences(self, first: str, second: str) -> list[str]:
        """What it says about "the same scaling law", for people."""
        small, large = self.within
        low, high = self.exponent_interval
        farthest = self.predictions[-1]
        far = farthest.ratio.interval
        said = [
            f"{second} against {first}: its loss is {_percent(small.ratio.value)} at N = {count(small.size)} "
            f"and {_percent(large.ratio.value)} at N = {count(large.size)}; b differs by "
            f"{self.exponent_difference:+.4f} [{low:+.4f}, {high:+.4f}]."
        ]
        if low <= 0 <= high:
            said.append(
                "The same scaling law? The points don't tell the exponents apart, which is no evidence that "
                f"they are the same: at N = {count(farthest.size)} the loss may be anything from "
                f"{_percent(far[0])} to {_percent(far[1])}."
            )
        else:
            slower = second if self.exponent_difference < 0 else first
            sure = "" if not self.few_sizes else " By so few sizes this is a hint and no proof."
            said.append(
                f"The same scaling law? Not by these points: the loss of {slower} falls more slowly with "
                f"size, so one law doesn't serve both.{sure}"
            )
        return said


def compare_laws(first: PowerLaw, second: PowerLaw, at: Sequence[float] = ()) -> LawComparison:
    """Compare two fits over the draws that they share.

    Args:
        first, second: fitted with equal `seed`, so that they share the draws of sizes, and with different
            `stream`, so that they don't share those of seeds.
        at: sizes to compare the losses at, besides the ends of the common range and ten times its largest.
    """
    ends = (
        max(first.size_range[0], second.size_range[0]),
        min(first.size_range[1], second.size_range[1]),
    )
    sizes = np.array(sorted({*ends, *map(float, at), BEYOND * ends[1]}))
    num_draws = min(len(first.draws), len(second.draws))
    one, two = first.draws[:num_draws], second.draws[:num_draws]
    quantiles = tails(first.confidence)
    lows, highs = np.exp(np.quantile(log_losses(two, sizes) - log_losses(one, sizes), quantiles, axis=0))
    ratios = second(sizes) / first(sizes)
    return LawComparison(
        predictions=tuple(
            Prediction(
                float(size), Ratio(float(ratio), (float(low), float(high))), not ends[0] <= size <= ends[1]
            )
            for size, ratio, low, high in zip(sizes, ratios, lows, highs, strict=True)
        ),
        a_ratio=Ratio(second.a / first.a, _interval(np.exp(two[:, 0] - one[:, 0]), quantiles)),
        b_ratio=Ratio(second.b / first.b, _interval(two[:, 1] / one[:, 1], quantiles)),
        exponent_difference=second.b - first.b,
        exponent_interval=_interval(two[:, 1] - one[:, 1], quantiles),
        few_sizes=min(first.num_sizes, second.num_sizes) < FEW_SIZES,
    )


def _interval(draws: FloatArray, quantiles: tuple[float, float]) -> Interval:
    low, high = np.quantile(draws, quantiles)
    return float(low), float(high)


def _percent(ratio: float) -> str:
    """1.05 as "5.0 % above", 0.9 as "10.0 % below"."""
    return f"{100 * abs(ratio - 1):.1f} % {'above' if ratio >= 1 else 'below'}"
