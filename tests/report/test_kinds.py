"""Runs grouped by what they share but for the seed, and compared seed by seed."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from run_writer import NewRun

from clip_la.report.compare import Comparison, compare
from clip_la.report.kinds import t_interval
from clip_la.report.runs import read_runs

SOFTMAX, LINEAR = {"kind": "softmax"}, {"kind": "eq7"}


@pytest.fixture
def seeds(new_run: NewRun) -> list[Path]:
    """Three seeds of either kind; the linear one is worse by 0.1, 0.2 and 0.3, and shares their luck."""
    folders = []
    for kind, attention, worse in (("softmax", SOFTMAX, 0.0), ("la", LINEAR, 0.1)):
        for seed in range(3):
            loss = 1.0 + seed + worse * (seed + 1)
            run = new_run(f"{kind}-{seed}", model=kind, seed=seed).start(attention=attention, model=kind)
            run.train(1000, loss).eval(1000, "validation", loss=loss + 1).zeroshot(1000, 0.5 - loss / 100)
            folders.append(run.end(1000).folder)
    return folders


def comparison_of(folders: list[Path]) -> Comparison:
    return compare(read_runs(folders))


def test_seeds_of_a_kind_are_one_kind(seeds: list[Path]) -> None:
    found = comparison_of(seeds)
    assert [(kind.label, dict(kind.runs)) for kind in found.kinds] == [
        ("softmax", {0: "softmax-0", 1: "softmax-1", 2: "softmax-2"}),
        ("Eq. 7", {0: "la-0", 1: "la-1", 2: "la-2"}),
    ]
    assert found.warnings == ()


def test_differences_are_paired_by_seed(seeds: list[Path]) -> None:
    training, validation, top1 = comparison_of(seeds[::-1]).paired
    assert [pair.metric for pair in (training, validation, top1)] == [
        "training loss", "loss, validation", "top-1, held_out"
    ]  # fmt: skip
    assert (training.first, training.second) == ("softmax", "Eq. 7"), "softmax is the baseline in any order"
    assert dict(zip(training.seeds, training.differences, strict=True)) == pytest.approx(
        {0: 0.1, 1: 0.2, 2: 0.3}
    )
    # By hand: mean 0.2, s 0.1, t(2) 4.303: 0.2 +- 4.303 * 0.1 / sqrt(3).
    assert training.interval == pytest.approx((0.2 - 0.2484, 0.2 + 0.2484), abs=1e-4)
    assert training.verdict == "3 seeds don't tell them apart"
    assert (training.first_mean, training.second_mean) == pytest.approx((2.0, 2.2))


def test_a_difference_beyond_the_scatter_says_so(new_run: NewRun) -> None:
    folders = []
    for kind, attention, loss in (("softmax", SOFTMAX, 1.0), ("la", LINEAR, 1.5)):
        for seed in range(3):
            run = new_run(f"{kind}-{seed}", model=kind, seed=seed).start(attention=attention, model=kind)
            folders.append(run.train(1000, loss + 0.01 * seed * len(kind)).end(1000).folder)
    (pair,) = comparison_of(folders).paired
    assert pair.verdict == "differs beyond the scatter of 3 seeds"


def test_one_seed_is_said_plainly(seeds: list[Path]) -> None:
    found = comparison_of([seeds[0], seeds[3]])
    assert all(pair.interval is None for pair in found.paired)
    assert {pair.verdict for pair in found.paired} == {"one seed: can't be told from luck"}
    assert any("one seed a kind" in finding.message for finding in found.findings)


def test_only_shared_seeds_are_paired_and_the_rest_is_a_warning(seeds: list[Path]) -> None:
    found = comparison_of([*seeds[:3], seeds[4]])
    assert found.paired[0].seeds == (1,)
    (warning,) = found.warnings
    assert "softmax: 0, 1, 2; Eq. 7: 1" in warning.message
    assert comparison_of([seeds[0], seeds[4]]).paired == ()


def test_a_repeat_is_no_further_seed(seeds: list[Path], new_run: NewRun) -> None:
    again = new_run("again", model="la", seed=0).start(attention=LINEAR, model="la").train(1000, 9.0)
    found = comparison_of([*seeds, again.end(1000).folder])
    assert found.kinds[1].repeats == ("again",)
    assert found.paired[0].differences == pytest.approx((0.1, 0.2, 0.3))
    assert any("again repeat(s) the config and seed" in finding.message for finding in found.findings)


def test_what_is_not_finite_is_not_paired(seeds: list[Path], new_run: NewRun) -> None:
    broken = new_run("broken", model="la", seed=0).start(attention=LINEAR, model="la").train(1000, None)
    found = comparison_of([*seeds[:3], broken.end(1000, "non_finite").folder, *seeds[4:]])
    assert found.paired[0].seeds == (1, 2)


def test_kinds_are_named_by_what_tells_them_apart(new_run: NewRun) -> None:
    def folder(name: str, model: str, **config: object) -> Path:
        run = new_run(name, model=model, **config).start(attention=LINEAR, model=model)
        return run.train(1000, 1.0).end(1000).folder

    folders = [folder("a", "S"), folder("b", "B"), folder("c", "B", lr=0.1, workers=3)]
    labels = [kind.label for kind in comparison_of(folders).kinds]
    assert labels == ["Eq. 7, S, lr 0.001", "Eq. 7, B, lr 0.001", "Eq. 7, B, lr 0.1"]


def test_interval_of_student() -> None:
    assert t_interval([1.0]) is None
    values = [float(i % 5) for i in range(40)]
    low, high = t_interval(values) or (0.0, 0.0)
    half = 1.96 * statistics.stdev(values) / 40**0.5
    assert (low, high) == pytest.approx((2 - half, 2 + half))
