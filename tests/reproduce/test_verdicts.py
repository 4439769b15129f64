"""The words of the page follow from the numbers: made-up numbers, and what must be said of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clip_la.report.fit import fit_power_law
from clip_la.report.law_comparison import compare_laws
from clip_la.reproduce.verdicts import (
    Line,
    convergence_claim,
    exponent_claim,
    level_claim,
    slope_claim,
    speedup_claim,
)

SIZES = [1e5, 3e5, 1e6, 3e6, 1e7]


def line(label: str, slope: float, at_1024: float, lengths: tuple[int, ...] = (1024, 4096, 16384)) -> Line:
    return Line(label, {N: at_1024 * (N / 1024) ** slope for N in lengths}, slope, lengths)


def power_law(a: float, b: float, sizes: list[float] = SIZES, scatter: float = 0.0):
    signs = [1, -1, 1, -1, 1, -1]
    return fit_power_law(
        sizes, [a * N**-b * (1 + scatter * sign) for N, sign in zip(sizes, signs, strict=False)]
    )


@pytest.mark.parametrize(
    ("slope", "expected", "verdict"),
    [(2.1, 2, "agrees"), (1.7, 2, "disagrees"), (0.9, 1, "agrees"), (1.2, 1, "disagrees")],
)
def test_a_slope_is_judged_by_its_distance(slope: float, expected: float, verdict: str) -> None:
    claim = slope_claim(line("Eq. 7", slope, 0.1), expected)
    assert claim.verdict == verdict
    assert f"N^{slope:.2f} over 3 lengths, 1,024 to 16,384 tokens" in claim.found


def test_two_lengths_or_a_narrow_range_do_not_make_a_slope() -> None:
    assert slope_claim(line("Eq. 7", 1.0, 0.1, (1024, 16384)), 1).verdict == "can't tell"
    assert slope_claim(line("Eq. 7", 1.0, 0.1, (1024, 2048, 4096)), 1).verdict == "can't tell"


def test_a_speedup_that_was_not_measured_is_not_claimed() -> None:
    claim = speedup_claim(line("softmax", 2, 1.0), line("Eq. 7", 1, 0.1))
    assert claim.verdict == "can't tell"
    assert "160 times as fast as softmax at 16,384 tokens" in claim.found
    assert "39,062 times at 4,000,000 tokens, which wasn't measured" in claim.found  # 10 x 4e6 / 1024
    assert (
        speedup_claim(line("softmax", 2, 1.0), line("Eq. 7", 1, 0.01)).verdict == "agrees"
    )  # 1,600 at 16,384
    far = (1024, 4_194_304)
    slow = speedup_claim(line("softmax", 1.2, 1.0, far), line("Eq. 7", 1, 0.5, far))
    assert slow.verdict == "disagrees"


def test_the_longest_length_of_softmax_is_compared_not_that_of_the_linear_one() -> None:
    claim = speedup_claim(line("softmax", 2, 1.0), line("Eq. 7", 1, 0.1, (1024, 4096, 16384, 262144)))
    assert "at 16,384 tokens" in claim.found


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ((1.01, 1.00, 1.02), "agrees"),
        ((0.80, 0.81, 0.79), "agrees"),  # better is not worse
        ((1.30, 1.31, 1.29), "disagrees"),
        ((1.00, 1.20, 1.05), "can't tell"),
        ((1.20,), "can't tell"),
    ],
)
def test_convergence_is_judged_by_the_interval_over_seeds(losses: tuple[float, ...], verdict: str) -> None:
    claim = convergence_claim("Eq. 7", "softmax", losses, [1.0] * len(losses), 1000)
    assert claim.verdict == verdict
    assert "after 1,000 samples" in claim.found


def test_seeds_are_compared_in_pairs() -> None:
    """Seeds scatter by 20 %, but the kinds differ by 1 % in each."""
    claim = convergence_claim("Eq. 7", "softmax", [1.01, 1.212, 0.808], [1.0, 1.2, 0.8], 1000)
    assert claim.verdict == "agrees"
    assert "+1.0% [+1.0%, +1.0%]" in claim.found


def test_equal_exponents_agree_and_different_ones_do_not() -> None:
    softmax, same, other = power_law(593, 0.362), power_law(376, 0.34), power_law(593, 0.25)
    assert (
        exponent_claim("Eq. 7", "softmax", (same, softmax), compare_laws(softmax, same)).verdict == "agrees"
    )
    claim = exponent_claim("Eq. 7", "softmax", (other, softmax), compare_laws(softmax, other))
    assert claim.verdict == "disagrees"
    assert "N^-0.250 with Eq. 7, N^-0.362 with softmax" in claim.found
    assert "differ by -0.112" in claim.found
    rising = power_law(1.4, -0.07)
    claim = exponent_claim("Eq. 7", "softmax", (rising, softmax), compare_laws(softmax, rising))
    assert "N^+0.070 with Eq. 7" in claim.found


def test_scatter_or_few_sizes_leave_the_exponents_open() -> None:
    softmax, scattered = power_law(593, 0.362), power_law(593, 0.362, scatter=0.2)
    found = compare_laws(softmax, scattered)
    assert exponent_claim("Eq. 7", "softmax", (scattered, softmax), found).verdict == "can't tell"
    few = [power_law(a, b, SIZES[:3]) for a, b in ((593, 0.362), (593, 0.25))]
    assert exponent_claim("Eq. 7", "softmax", (few[1], few[0]), compare_laws(*few)).verdict == "can't tell"


def test_levels_are_judged_at_both_ends() -> None:
    softmax = power_law(593, 0.362)
    for factor, verdict in ((1.02, "agrees"), (1.3, "disagrees")):
        other = power_law(593 * factor, 0.362)
        claim = level_claim("Eq. 7", "softmax", compare_laws(softmax, other))
        assert claim.verdict == verdict
        assert f"{factor - 1:+.1%}" in claim.found
    crossing = power_law(593 * 1.05 * 1e6**-0.05, 0.312)  # below 5 % at one end, above at the other
    found = compare_laws(softmax, crossing)
    assert level_claim("Eq. 7", "softmax", found).verdict == "can't tell"
    assert level_claim("Eq. 7", "softmax", replace(found, few_sizes=True)).verdict == "can't tell"
