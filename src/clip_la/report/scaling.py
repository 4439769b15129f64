"""Scaling laws of runs: loss over model size for each kind of attention, fitted and compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np

from clip_la.report.compare import Comparison, compare
from clip_la.report.differences import groups
from clip_la.report.drawing import colour_of
from clip_la.report.fit import FloorLaw, PowerLaw, fit_floor_law, fit_power_law, limits_of
from clip_la.report.law_comparison import LawComparison, compare_laws
from clip_la.report.runs import Run, RunError
from clip_la.report.summary import RunSummary, attention_label

TRAIN_LOSS = "train"
_MUCH_BETTER = 0.7  # of the largest error
Parameters = Literal["image", "text", "total"]


@dataclass(frozen=True)
class ScalingPoint:
    """One run as a point of the fit.

    Attributes:
        attention: the kind of model; points of one kind are fitted together.
        parameters: of the "image" and "text" tower and in "total", as far as they are known.
        num_negatives: that the loss was taken over; None where it isn't known.
    """

    run: str
    attention: str
    seed: Any
    parameters: Mapping[str, int]
    loss: float
    num_negatives: int | None = None


@dataclass(frozen=True)
class Scaling:
    """Fits per kind of attention (by its label) and between kinds.

    Attributes:
        parameters: which parameters N counts.
        laws: attention -> law; a kind with fewer than two sizes has none, and `limits` says so.
        floors: attention -> law with an irreducible term, for kinds of at least three sizes.
        comparisons: (first, second) -> how the second stands to the first.
        colours: attention -> colour.
        limits: what the points cannot show.
    """

    loss_name: str
    parameters: Parameters
    points: tuple[ScalingPoint, ...]
    laws: dict[str, PowerLaw]
    floors: dict[str, FloorLaw]
    comparisons: dict[tuple[str, str], LawComparison]
    colours: dict[str, str]
    limits: tuple[str, ...]


def fit_runs(
    runs: Sequence[Run],
    *,
    loss: str = "validation",
    parameters: Parameters = "image",
    at: Sequence[float] = (),
    seed: int = 0,
    left_out: Mapping[str, str] | None = None,
) -> Scaling:
    """Fit L(N) = a N^-b, and with a floor, over the runs of each kind of attention.

    Args:
        runs: with unique names, as `read_runs` gives them.
        loss: the name of an evaluation that reports a loss, of which the last value is taken, or "train":
            the final training loss of the tables.
        parameters: what N counts. A small model is mostly its table of words, so "total" hardly grows.
        at: sizes to compare kinds at, besides those of the runs.
        seed: of the bootstrap.
        left_out: runs that could not be read: name -> problem.

    Raises:
        RunError: a run lacks that loss or its size, the loss isn't finite or was not taken over the same
            number of negatives in all runs, or no kind has two sizes.
    """
    comparison = compare(runs, left_out=left_out)
    points = [
        _point(run, summary, comparison, loss)
        for run, summary in zip(runs, comparison.summaries, strict=True)
    ]
    scaling = fit_points(points, loss_name=loss, parameters=parameters, at=at, seed=seed)
    floor = _loss_floor(comparison.summaries) if loss == TRAIN_LOSS else []
    warnings = [finding.message for finding in comparison.warnings]
    return replace(
        scaling,
        colours={attention_label(run.attention): colour_of(run.attention) for run in runs},
        limits=(*scaling.limits, *floor, *warnings),
    )


def fit_points(
    points: Sequence[ScalingPoint],
    *,
    loss_name: str,
    parameters: Parameters = "image",
    at: Sequence[float] = (),
    seed: int = 0,
) -> Scaling:
    """Fit points of any origin; arguments and errors as in `fit_runs`."""
    _refuse_unequal_negatives(points, loss_name)
    laws, floors, limits = {}, {}, []
    kinds = list(dict.fromkeys(point.attention for point in points))
    for stream, kind in enumerate(kinds):
        chosen = [point for point in points if point.attention == kind]
        sizes, losses = [size_of(point, parameters) for point in chosen], [point.loss for point in chosen]
        try:
            laws[kind] = fit_power_law(sizes, losses, seed=seed, stream=stream)
        except ValueError as error:
            limits.append(f"{kind}: not fitted: {error}.")
            continue
        if laws[kind].num_sizes >= 3:
            floors[kind] = fit_floor_law(sizes, losses, seed=seed, stream=stream)
    if not laws:
        raise RunError("nothing to fit: " + " ".join(limits))
    for limit in dict.fromkeys(limit for law in laws.values() for limit in limits_of(law)):
        concerned = [kind for kind, law in laws.items() if limit in limits_of(law)]
        limits.append(f"{'; '.join(concerned)}: {limit}")
    limits += [f"{kind}, with a floor: {floor.problem}." for kind, floor in floors.items() if floor.problem]
    limits += [sentence for pair in combinations(floors, 2) for sentence in _bends(pair, laws, floors)]
    pairs = {pair: compare_laws(laws[pair[0]], laws[pair[1]], at) for pair in combinations(laws, 2)}
    colours = {kind: f"C{number}" for number, kind in enumerate(kinds)}
    return Scaling(loss_name, parameters, tuple(points), laws, floors, pairs, colours, tuple(limits))


def _bends(
    pair: tuple[str, str], laws: Mapping[str, PowerLaw], floors: Mapping[str, FloorLaw]
) -> Iterator[str]:
    """Where a floor may be what makes two exponents look different."""
    first, second = (floors[kind] for kind in pair)
    fits_better = any(floors[kind].max_error < _MUCH_BETTER * laws[kind].max_error for kind in pair)
    (low_1, high_1), (low_2, high_2) = first.b_interval, second.b_interval
    if fits_better and low_1 <= high_2 and low_2 <= high_1:
        yield (
            f"{pair[1]} against {pair[0]}: laws with a floor fit better, and their exponents "
            f"({second.b:.3f} [{low_2:.3f}, {high_2:.3f}] and {first.b:.3f} [{low_1:.3f}, {high_1:.3f}]) "
            "aren't told apart: a difference of exponents without a floor may be the floor's bend."
        )


def size_of(point: ScalingPoint, parameters: Parameters) -> int:
    """N of a point.

    Raises:
        RunError: that count isn't known.
    """
    if parameters not in point.parameters:
        known = ", ".join(point.parameters) or "none"
        raise RunError(
            f"{point.run}: its number of {parameters} parameters is not known (known: {known}); "
            "choose another with --parameters, or leave the run out"
        )
    return point.parameters[parameters]


def _point(run: Run, summary: RunSummary, comparison: Comparison, loss: str) -> ScalingPoint:
    losses = {value.name: value.last for value in summary.validation} | {TRAIN_LOSS: summary.train_loss}
    if loss not in losses:
        raise RunError(
            f"{summary.name}: has no loss {loss!r}; it has {', '.join(losses)}: choose with --loss"
        )
    if not np.isfinite(losses[loss]):
        raise RunError(f"{summary.name}: its {loss} loss is not finite; leave the run out")
    negatives = [point.metrics.get("num_negatives") for point in run.evals if point.name == loss]
    return ScalingPoint(
        run=summary.name,
        attention=summary.attention,
        seed=summary.seed,
        parameters=comparison.facts[summary.name].parameters,
        loss=losses[loss],
        num_negatives=negatives[-1] if negatives else None,
    )


def _refuse_unequal_negatives(points: Sequence[ScalingPoint], loss_name: str) -> None:
    found = {point.run: point.num_negatives for point in points}
    if len(set(found.values())) > 1:
        raise RunError(
            f"the loss {loss_name!r} was not taken over the same number of negatives: {groups(found)}; its "
            "level moves with it, so these can't be points of one law: give all the same --val-block-size"
        )


def _loss_floor(summaries: Sequence[RunSummary]) -> list[str]:
    batches = sorted({summary.global_batch_size for summary in summaries if summary.global_batch_size})
    if len(batches) < 2:
        return []
    return [
        f"The global batch is not the same in all runs ({', '.join(map(str, batches))}): a contrastive "
        "loss is taken over as many negatives, and its level at guessing, ln B, moves with them. "
        "Part of the slope may be that."
    ]
