"""Power laws L(N) = a N^-b of loss L over model size N, with bootstrap intervals.

A law is fitted by least squares on log L over log N. The bootstrap draws sizes with replacement and,
within each size drawn, its seeds, so intervals hold both the scatter about the law and that of seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Interval = tuple[float, float]

_FEW_SIZES = 5
_NARROW_RANGE = 10.0


@dataclass(frozen=True)
class PowerLaw:
    """L(N) = a N^-b. Intervals are percentile bootstrap intervals at `confidence`.

    Attributes:
        num_points, num_sizes: losses fitted, and distinct N among them.
        size_range: smallest and largest N.
        max_error: largest |L / fit - 1| over the points.
        draws: (num_draws, 2) bootstrap draws of (log a, b).
    """

    a: float
    b: float
    a_interval: Interval
    b_interval: Interval
    confidence: float
    num_points: int
    num_sizes: int
    size_range: Interval
    max_error: float
    draws: FloatArray = field(repr=False)

    def __call__(self, num_parameters: npt.ArrayLike) -> FloatArray:
        """The law's loss at N, same shape."""
        return self.a * np.asarray(num_parameters, dtype=np.float64) ** -self.b

    def band(self, num_parameters: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
        """Lower and upper end of the bootstrap interval of the law's loss at N (n,), each (n,)."""
        low, high = np.quantile(_log_losses(self.draws, num_parameters), _tails(self.confidence), axis=0)
        return np.exp(low), np.exp(high)


@dataclass(frozen=True)
class LawComparison:
    """How a second law stands to a first: L2(N) / L1(N) at the ends of the sizes both saw, and b2 - b1.

    `few_sizes`: a law has so few sizes that the intervals are too narrow to conclude from.
    """

    sizes: Interval
    ratios: tuple[float, float]
    ratio_intervals: tuple[Interval, Interval]
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


def fit_power_law(
    num_parameters: Sequence[float],
    losses: Sequence[float],
    *,
    num_draws: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> PowerLaw:
    """Fit L(N) = a N^-b.

    Args:
        num_parameters: N of each point; equal numbers are seeds of one size.
        losses: L of each point.
        num_draws: bootstrap draws.
        confidence: of the intervals.
        seed: of the bootstrap.

    Raises:
        ValueError: fewer than two sizes, or a number that isn't finite and positive.
    """
    n, loss = np.asarray(num_parameters, np.float64), np.asarray(losses, np.float64)
    _check(n, loss)
    log_a, b = _least_squares(np.log(n), np.log(loss))
    draws = _bootstrap(np.log(n), np.log(loss), num_draws, np.random.default_rng(seed))
    lows, highs = np.quantile(draws, _tails(confidence), axis=0)
    return PowerLaw(
        a=math.exp(log_a),
        b=b,
        a_interval=(math.exp(lows[0]), math.exp(highs[0])),
        b_interval=(float(lows[1]), float(highs[1])),
        confidence=confidence,
        num_points=len(n),
        num_sizes=len(np.unique(n)),
        size_range=(float(n.min()), float(n.max())),
        max_error=float(np.abs(np.expm1(np.log(loss) - (log_a - b * np.log(n)))).max()),
        draws=draws,
    )


def compare_laws(first: PowerLaw, second: PowerLaw) -> LawComparison:
    """The second law's loss over the first's, and the difference of exponents, with intervals.

    The two laws' draws are taken as independent, so give the fits different seeds.
    """
    ends = (
        max(first.size_range[0], second.size_range[0]),
        min(first.size_range[1], second.size_range[1]),
    )
    num_draws = min(len(first.draws), len(second.draws))
    one, two = first.draws[:num_draws], second.draws[:num_draws]
    tails = _tails(first.confidence)
    low, high = np.exp(np.quantile(_log_losses(two, ends) - _log_losses(one, ends), tails, axis=0))
    exponents = np.quantile(two[:, 1] - one[:, 1], tails)
    ratios = second(ends) / first(ends)
    return LawComparison(
        sizes=ends,
        ratios=(float(ratios[0]), float(ratios[1])),
        ratio_intervals=((float(low[0]), float(high[0])), (float(low[1]), float(high[1]))),
        exponent_difference=second.b - first.b,
        exponent_interval=(float(exponents[0]), float(exponents[1])),
        few_sizes=min(first.num_sizes, second.num_sizes) < _FEW_SIZES,
    )


def limits_of(law: PowerLaw) -> list[str]:
    """What a fit over these points cannot show, in sentences."""
    limits = []
    left = law.num_sizes - 2
    if left == 0:
        limits.append("Two sizes fix a and b exactly: they can't test that a power law holds.")
    elif law.num_sizes < _FEW_SIZES:
        limits.append(
            f"{law.num_sizes} sizes for 2 numbers leave {left} degree{'s' if left > 1 else ''} of freedom: "
            "they show that loss falls with size and about how fast, not that it falls by a power law "
            "(one with a floor, E + a N^-b, "
            + ("has three numbers for the three points" if left == 1 else "may fit them as well")
            + "), and not what happens at larger sizes. The interval is the spread of fits to some of the "
            "points, an underestimate with so few."
        )
    if law.num_points == law.num_sizes:
        limits.append("One run a size: the interval knows nothing of the scatter between seeds.")
    if law.size_range[1] < _NARROW_RANGE * law.size_range[0]:
        spread = law.size_range[1] / law.size_range[0]
        limits.append(f"The sizes span only a factor of {spread:.3g}; a and b are nearly one number.")
    return limits


def _check(n: FloatArray, loss: FloatArray) -> None:
    if n.shape != loss.shape or n.ndim != 1:
        raise ValueError(f"{n.size} sizes and {loss.size} losses; expected one loss a size")
    for what, values in (("size", n), ("loss", loss)):
        bad = values[~(np.isfinite(values) & (values > 0))]
        if bad.size:
            raise ValueError(f"a {what} is {bad[0]}; a power law needs finite numbers above 0")
    if len(np.unique(n)) < 2:
        raise ValueError(f"{len(np.unique(n))} model size(s); a power law needs at least 2, better 5")


def _least_squares(log_n: FloatArray, log_loss: FloatArray) -> tuple[float, float]:
    """(log a, b) that minimise the squared error of log L = log a - b log N."""
    centred = log_n - log_n.mean()
    b = -float(centred @ log_loss / (centred @ centred))
    return float(log_loss.mean() + b * log_n.mean()), b


def _bootstrap(
    log_n: FloatArray, log_loss: FloatArray, num_draws: int, rng: np.random.Generator
) -> FloatArray:
    by_size = [log_loss[log_n == size] for size in np.unique(log_n)]
    sizes = np.unique(log_n)
    draws = np.empty((num_draws, 2))
    for draw in draws:
        chosen = rng.integers(len(sizes), size=len(sizes))
        while (chosen == chosen[0]).all():  # one size alone has no slope
            chosen = rng.integers(len(sizes), size=len(sizes))
        seeds = [rng.choice(by_size[i], size=len(by_size[i])) for i in chosen]
        draw[:] = _least_squares(np.repeat(sizes[chosen], [len(s) for s in seeds]), np.concatenate(seeds))
    return draws


def _log_losses(draws: FloatArray, num_parameters: npt.ArrayLike) -> FloatArray:
    """(num_draws, n): log L of each draw at each N."""
    log_n = np.log(np.asarray(num_parameters, np.float64))
    losses: FloatArray = draws[:, :1] - draws[:, 1:] * log_n
    return losses


def _tails(confidence: float) -> tuple[float, float]:
    return (1 - confidence) / 2, (1 + confidence) / 2
