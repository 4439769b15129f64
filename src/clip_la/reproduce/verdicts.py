"""What was found beside what the paper claims, in words that follow from the numbers.

Every threshold is a constant here, and every sentence says it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from clip_la.report.fit import PowerLaw
from clip_la.report.kinds import t_interval
from clip_la.report.law_comparison import LawComparison
from clip_la.report.text import count

Verdict: TypeAlias = Literal["agrees", "disagrees", "can't tell"]

SLOPE_TOLERANCE = 0.15
LIKE = 0.05
"""Two losses are called alike within 5 %: so far are the paper's own fits apart at its smallest model."""

PAPER_SPEEDUP, PAPER_TOKENS = 1e3, 4e6
PAPER_EXPONENTS = {"softmax": 0.362, "linear": 0.332}
SAME_EXPONENT = 0.03
"""Two exponents are called the same within 0.03: so far do the paper's two lie apart."""

_MIN_LENGTHS, _MIN_SPAN = 3, 10.0


@dataclass(frozen=True)
class Claim:
    """One claim of the paper, what was found here, and how the two stand."""

    paper: str
    found: str
    verdict: Verdict


@dataclass(frozen=True)
class Line:
    """Seconds of one operator by tokens, in order; the slope is that of `fitted_to`, in logarithms."""

    label: str
    seconds: Mapping[int, float]
    slope: float
    fitted_to: Sequence[int]

    def extrapolated(self, tokens: float) -> float:
        """Seconds at `tokens`, from the longest one measured, by the slope."""
        longest = max(self.seconds)
        return float(self.seconds[longest] * (tokens / longest) ** self.slope)


def slope_claim(line: Line, expected: float) -> Claim:
    """Time grows as N^expected."""
    shortest, longest = min(line.fitted_to), max(line.fitted_to)
    enough = len(line.fitted_to) >= _MIN_LENGTHS and longest >= _MIN_SPAN * shortest
    needed = "" if enough else f"; to judge it takes {_MIN_LENGTHS} lengths over a factor of {_MIN_SPAN:g}"
    near = abs(line.slope - expected) <= SLOPE_TOLERANCE
    return Claim(
        paper=f"The time of {line.label} grows as N^{expected:g}.",
        found=f"N^{line.slope:.2f} over {len(line.fitted_to)} lengths, {shortest:,} to {longest:,} tokens "
        f"(the same within {SLOPE_TOLERANCE:g}){needed}.",
        verdict="can't tell" if not enough else "agrees" if near else "disagrees",
    )


def speedup_claim(softmax: Line, linear: Line) -> Claim:
    """Linear attention is up to 1e3 times as fast at 4e6 tokens."""
    longest = max(set(softmax.seconds) & set(linear.seconds))
    measured = softmax.seconds[longest] / linear.seconds[longest]
    there = softmax.extrapolated(PAPER_TOKENS) / linear.extrapolated(PAPER_TOKENS)
    verdict: Verdict = "disagrees" if longest >= PAPER_TOKENS else "can't tell"
    return Claim(
        paper=f"Linear attention is up to {PAPER_SPEEDUP:,.0f} times as fast, at {PAPER_TOKENS:,.0f} tokens "
        "on a GPU.",
        found=f"{linear.label} was {measured:,.0f} times as fast as {softmax.label} at {longest:,} tokens, "
        f"the longest that both were timed at. By the fitted slopes it would be {there:,.0f} times at "
        f"{PAPER_TOKENS:,.0f} tokens, which wasn't measured.",
        verdict="agrees" if measured >= PAPER_SPEEDUP else verdict,
    )


def convergence_claim(
    label: str, baseline: str, losses: Sequence[float], baseline_losses: Sequence[float], samples: int
) -> Claim:
    """A kind learns as the baseline does: held-out losses alike within `LIKE` after equal samples.

    Args:
        label, baseline: what the two kinds are called.
        losses, baseline_losses: at the end, seed by seed.
        samples: that each has seen.
    """
    logs = [math.log(one / two) for one, two in zip(losses, baseline_losses, strict=True)]
    interval = t_interval(logs)
    change = math.expm1(math.fsum(logs) / len(logs))
    after = f"after {samples:,} samples"
    paper = f"{label} converges like {baseline}."
    if interval is None:
        found = (
            f"Its held-out loss is {change:+.1%} against {baseline}'s {after}; one seed can't "
            "be told from luck."
        )
        return Claim(paper, found, "can't tell")
    low, high = (math.expm1(end) for end in interval)
    found = (
        f"Its held-out loss is {change:+.1%} [{low:+.1%}, {high:+.1%}] against {baseline}'s {after} "
        f"({len(logs)} seeds, 95 %); alike means within {LIKE:.0%}."
    )
    return Claim(paper, found, _alike(low, high))


def exponent_claim(second: str, first: str, laws: tuple[PowerLaw, PowerLaw], found: LawComparison) -> Claim:
    """Both losses fall with model size by the same exponent.

    Args:
        second, first: what the two kinds are called.
        laws: of the second and of the first.
        found: the second law compared with the first.
    """
    low, high = found.exponent_interval
    verdict: Verdict = "can't tell"
    if not found.few_sizes and max(-low, high) <= SAME_EXPONENT:
        verdict = "agrees"
    elif not found.few_sizes and (low > SAME_EXPONENT or high < -SAME_EXPONENT):
        verdict = "disagrees"
    return Claim(
        paper="The same scaling law: L(N) falls as N^-{softmax:g} with softmax and N^-{linear:g} with linear "
        "attention.".format(**PAPER_EXPONENTS),
        found=f"N^{-laws[0].b:+.3f} with {second}, N^{-laws[1].b:+.3f} with {first}; the exponents differ by "
        f"{found.exponent_difference:+.3f} [{low:+.3f}, {high:+.3f}]; the same means within "
        f"{SAME_EXPONENT:g}, as far as the paper's two lie apart.",
        verdict=verdict,
    )


def level_claim(second: str, first: str, found: LawComparison) -> Claim:
    """The losses of the two laws are alike over the sizes that both have."""
    ends = [
        f"{end.ratio.value - 1:+.1%} [{end.ratio.interval[0] - 1:+.1%}, {end.ratio.interval[1] - 1:+.1%}] "
        f"at {count(end.size)} parameters"
        for end in found.within
    ]
    judged = {_alike(*(ratio - 1 for ratio in end.ratio.interval)) for end in found.within}
    both = judged.pop() if len(judged) == 1 else "can't tell"
    return Claim(
        paper="Linear attention's loss is near softmax's; by the published fits 5 % above at S/16, 14 % at "
        "L/16.",
        found=f"{second}'s fitted loss is {' and '.join(ends)} against {first}'s; alike means "
        f"within {LIKE:.0%}.",
        verdict="can't tell" if found.few_sizes else both,
    )


def _alike(low: float, high: float) -> Verdict:
    """Of a relative difference's interval: in +-LIKE or better, or above it, or across its end."""
    if high <= LIKE:
        return "agrees"
    return "disagrees" if low > LIKE else "can't tell"
