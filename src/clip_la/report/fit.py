"""Power laws of loss L over model size N with bootstrap intervals: L = a N^-b, and L = a N^-b + c.

The bootstrap draws sizes with replacement and, within each size drawn, its seeds, so intervals hold both the
scatter about the law and that of seeds. Fits with equal `seed` draw the same sizes (by their rank), so that a
size that lies off the law for every kind of model moves both sides of a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Interval = tuple[float, float]

FEW_SIZES = 5
_NARROW_RANGE = 10.0
_NO_FLOOR = 1e-3  # of the smallest loss: a floor below it is none
_VAGUE_FLOOR = 0.5  # of the smallest loss: an interval as wide says nothing
_B_RANGE = (0.01, 3.0)
_GRID, _ZOOMS = 97, 5


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
        low, high = np.quantile(log_losses(self.draws, num_parameters), tails(self.confidence), axis=0)
        return np.exp(low), np.exp(high)


@dataclass(frozen=True)
class FloorLaw:
    """L(N) = a N^-b + c with c >= 0, the loss that no size takes away. Intervals as in `PowerLaw`.

    Attributes:
        problem: why the points can't determine c; None where they do.
    """

    a: float
    b: float
    c: float
    a_interval: Interval
    b_interval: Interval
    c_interval: Interval
    num_points: int
    num_sizes: int
    max_error: float
    problem: str | None

    def __call__(self, num_parameters: npt.ArrayLike) -> FloatArray:
        """The law's loss at N, same shape."""
        return self.a * np.asarray(num_parameters, dtype=np.float64) ** -self.b + self.c


def fit_power_law(
    num_parameters: Sequence[float],
    losses: Sequence[float],
    *,
    num_draws: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
    stream: int = 0,
) -> PowerLaw:
    """Fit L(N) = a N^-b by least squares on log L over log N.

    Args:
        num_parameters: N of each point; equal numbers are seeds of one size.
        losses: L of each point.
        num_draws: bootstrap draws.
        confidence: of the intervals.
        seed: of the bootstrap's sizes.
        stream: with `seed`, of its seeds; another one for each law that is compared.

    Raises:
        ValueError: fewer than two sizes, or a number that isn't finite and positive.
    """
    n, loss = _checked(num_parameters, losses, least_sizes=2)
    log_n, log_loss = np.log(n), np.log(loss)
    ((log_a, b),) = _least_squares(log_n, log_loss, np.ones((1, len(n))))
    draws = _least_squares(log_n, log_loss, _counts(n, num_draws, seed, stream, least_sizes=2))
    lows, highs = np.quantile(draws, tails(confidence), axis=0)
    return PowerLaw(
        a=math.exp(log_a),
        b=float(b),
        a_interval=(math.exp(lows[0]), math.exp(highs[0])),
        b_interval=(float(lows[1]), float(highs[1])),
        confidence=confidence,
        num_points=len(n),
        num_sizes=len(np.unique(n)),
        size_range=(float(n.min()), float(n.max())),
        max_error=float(np.abs(np.expm1(log_loss - (log_a - b * log_n))).max()),
        draws=draws,
    )


def fit_floor_law(
    num_parameters: Sequence[float],
    losses: Sequence[float],
    *,
    num_draws: int = 500,
    confidence: float = 0.95,
    seed: int = 0,
    stream: int = 0,
) -> FloorLaw:
    """Fit L(N) = a N^-b + c, c >= 0, by least squares of relative errors.

    For each b the best a and c solve a linear problem, so only b is searched, over 0.01 to 3. Arguments as in
    `fit_power_law`.

    Raises:
        ValueError: fewer than three sizes, or a number that isn't finite and positive.
    """
    n, loss = _checked(num_parameters, losses, least_sizes=3)
    ((a, b, c),) = _fit_floors(n, loss, np.ones((1, len(n))))
    draws = _fit_floors(n, loss, _counts(n, num_draws, seed, stream, least_sizes=3))
    lows, highs = np.quantile(draws, tails(confidence), axis=0)
    c_interval = (float(lows[2]), float(highs[2]))
    num_sizes = len(np.unique(n))
    return FloorLaw(
        a=float(a),
        b=float(b),
        c=float(c),
        a_interval=(float(lows[0]), float(highs[0])),
        b_interval=(float(lows[1]), float(highs[1])),
        c_interval=c_interval,
        num_points=len(n),
        num_sizes=num_sizes,
        max_error=float(np.abs((a * n**-b + c) / loss - 1).max()),
        problem=_floor_problem(num_sizes, float(b), c_interval, float(loss.min())),
    )


def limits_of(law: PowerLaw) -> list[str]:
    """What a fit over these points cannot show, in sentences."""
    limits = []
    if law.b_interval[0] <= 0:
        limits.append(
            f"Loss may not fall with size at all: b = {law.b:.3f} [{law.b_interval[0]:.3f}, "
            f"{law.b_interval[1]:.3f}]. Look for a learning rate that is too high for the larger sizes."
        )
    left = law.num_sizes - 2
    if left == 0:
        limits.append("Two sizes fix a and b exactly: they can't test that a power law holds.")
    elif law.num_sizes < FEW_SIZES:
        limits.append(
            f"{law.num_sizes} sizes for 2 numbers leave {left} degree{'s' if left > 1 else ''} of freedom: "
            "they show that loss falls with size and about how fast, not that it falls by a power law "
            "(one with a floor, a N^-b + c, "
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


def log_losses(draws: FloatArray, num_parameters: npt.ArrayLike) -> FloatArray:
    """(num_draws, n): log L of each draw (log a, b) at each N."""
    log_n = np.log(np.asarray(num_parameters, np.float64))
    losses: FloatArray = draws[:, :1] - draws[:, 1:] * log_n
    return losses


def tails(confidence: float) -> tuple[float, float]:
    """The quantiles at the ends of an interval."""
    return (1 - confidence) / 2, (1 + confidence) / 2


def _checked(
    num_parameters: Sequence[float], losses: Sequence[float], least_sizes: int
) -> tuple[FloatArray, FloatArray]:
    n, loss = np.asarray(num_parameters, np.float64), np.asarray(losses, np.float64)
    if n.shape != loss.shape or n.ndim != 1:
        raise ValueError(f"{n.size} sizes and {loss.size} losses; expected one loss a size")
    for what, values in (("size", n), ("loss", loss)):
        bad = values[~(np.isfinite(values) & (values > 0))]
        if bad.size:
            raise ValueError(f"a {what} is {bad[0]}; a power law needs finite numbers above 0")
    num_sizes = len(np.unique(n))
    if num_sizes < least_sizes:
        raise ValueError(f"{num_sizes} model size(s); it needs at least {least_sizes}, better {FEW_SIZES}")
    return n, loss


def _counts(n: FloatArray, num_draws: int, seed: int, stream: int, least_sizes: int) -> FloatArray:
    """(num_draws, points): how often a bootstrap draw holds each point.

    Draws with fewer than `least_sizes` sizes, which fix no law, are drawn again.
    """
    sizes, rank = np.unique(n, return_inverse=True)
    members = [np.flatnonzero(rank == i) for i in range(len(sizes))]
    size_rng, seed_rng = np.random.default_rng(seed), np.random.default_rng([seed, stream])
    counts = np.zeros((num_draws, len(n)))
    for draw in counts:
        chosen = size_rng.integers(len(sizes), size=len(sizes))
        while len(set(chosen)) < least_sizes:
            chosen = size_rng.integers(len(sizes), size=len(sizes))
        for i in chosen:
            np.add.at(draw, seed_rng.choice(members[i], size=len(members[i])), 1)
    return counts


def _least_squares(log_n: FloatArray, log_loss: FloatArray, weights: FloatArray) -> FloatArray:
    """(draws, 2): the (log a, b) that minimise the weighted squared error of log L = log a - b log N."""
    total = weights.sum(1)
    mean_n, mean_loss = weights @ log_n / total, weights @ log_loss / total
    centred = log_n - mean_n[:, None]
    b = -(weights * centred * log_loss).sum(1) / (weights * centred**2).sum(1)
    fits: FloatArray = np.stack([mean_loss + b * mean_n, b], axis=1)
    return fits


def _fit_floors(n: FloatArray, loss: FloatArray, weights: FloatArray) -> FloatArray:
    """(draws, 3): the (a, b, c) that minimise the weighted squares of (a N^-b + c) / L - 1."""
    low, high = (np.full(len(weights), math.log(b)) for b in _B_RANGE)
    unit = float(np.exp(np.log(n).mean()))  # a N^-b = a' (N / unit)^-b keeps numbers near 1
    rows = np.arange(len(weights))
    for _ in range(_ZOOMS):
        grid = np.linspace(low, high, _GRID, axis=1)
        a, c, error = _best_floors(n / unit, loss, weights, np.exp(grid))
        best = error.argmin(1)
        low, high = grid[rows, np.maximum(best - 1, 0)], grid[rows, np.minimum(best + 1, _GRID - 1)]
    b = np.exp(grid[rows, best])
    return np.stack([a[rows, best] * unit**b, b, c[rows, best]], axis=1)


def _best_floors(
    n: FloatArray, loss: FloatArray, weights: FloatArray, b: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """a, c >= 0 and the squared error for each draw and each of its b, all (draws, grid).

    Divided by L, the law reads 1 = a x + c y: two unknowns, solved by the normal equations; where that asks
    for c < 0 the best is at c = 0, and likewise for a.
    """
    x = n ** -b[:, :, None] / loss
    y = 1 / loss
    w = weights[:, None, :]
    xx, xy, yy = (w * x * x).sum(2), (w * x * y).sum(2), (w * y * y).sum(2)
    x1, y1 = (w * x).sum(2), (w * y).sum(2)
    with np.errstate(divide="ignore", invalid="ignore"):
        determinant = xx * yy - xy * xy
        a, c = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
    a, c = np.where(c < 0, x1 / xx, a), np.where(c < 0, 0.0, c)
    a, c = np.where(a < 0, 0.0, a), np.where(a < 0, y1 / yy, c)
    error = (w * (a[..., None] * x + c[..., None] * y - 1) ** 2).sum(2)
    return a, c, np.where(np.isfinite(error), error, np.inf)


def _floor_problem(num_sizes: int, b: float, c_interval: Interval, least_loss: float) -> str | None:
    low, high = c_interval
    if num_sizes == 3:
        return "three sizes for three numbers: they always fit, so c is not determined"
    if not _B_RANGE[0] * 1.01 < b < _B_RANGE[1] * 0.99:
        return f"b runs to the edge of what was searched ({b:.3g}): the points don't bend as this law does"
    if high <= _NO_FLOOR * least_loss:
        return "no floor is seen: c = 0 fits best"
    if low <= _NO_FLOOR * least_loss:
        return f"a floor can't be told from none: c may be anything from 0 to {high:.3g}"
    if high - low > _VAGUE_FLOOR * least_loss:
        return f"where the floor lies is open: c may be anything from {low:.3g} to {high:.3g}"
    return None
