"""Scaling-law fits: published laws recovered from their own points, honest intervals, plain limits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from run_writer import NewRun

from clip_la.report.fit import compare_laws, fit_power_law, limits_of
from clip_la.report.runs import RunError, read_runs
from clip_la.report.scaling import fit_runs, write_fit

SIZES = [22e6, 86e6, 304e6]
SOFTMAX, LINEAR = (593.0, 0.362), (376.0, 0.332)


def losses(law: tuple[float, float], sizes: list[float]) -> list[float]:
    return [law[0] * n ** -law[1] for n in sizes]


@pytest.mark.parametrize("law", [SOFTMAX, LINEAR])
def test_published_laws_are_recovered(law: tuple[float, float]) -> None:
    fit = fit_power_law(SIZES, losses(law, SIZES))
    assert fit.a == pytest.approx(law[0], rel=1e-9)
    assert fit.b == pytest.approx(law[1], rel=1e-9)
    assert fit.max_error < 1e-9
    assert fit(SIZES) == pytest.approx(losses(law, SIZES))


def test_published_ratio_between_kinds() -> None:
    found = compare_laws(
        fit_power_law(SIZES, losses(SOFTMAX, SIZES)), fit_power_law(SIZES, losses(LINEAR, SIZES), seed=1)
    )
    assert found.ratios == pytest.approx((1.05, 1.14), abs=0.01)
    assert found.exponent_difference == pytest.approx(-0.03)
    assert "too few to be sure" in found.verdict


def test_many_sizes_tell_exponents_apart() -> None:
    sizes = np.geomspace(1e6, 1e9, 6).tolist()
    fits = [fit_power_law(sizes, losses(law, sizes)) for law in (SOFTMAX, LINEAR)]
    assert compare_laws(*fits).verdict == "the points tell the exponents apart"


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    sizes = np.repeat(np.geomspace(1e6, 1e9, 6), 3)
    hits = 0
    for trial in range(60):
        noisy = 593 * sizes**-0.362 * np.exp(rng.normal(0, 0.05, len(sizes)))
        low, high = fit_power_law(sizes.tolist(), noisy.tolist(), num_draws=200, seed=trial).b_interval
        hits += low <= 0.362 <= high
    assert 45 <= hits <= 60


def test_noise_widens_intervals_and_hides_a_small_difference() -> None:
    rng = np.random.default_rng(0)
    sizes = np.geomspace(1e6, 1e9, 6).tolist()
    noise = np.exp(rng.normal(0, 0.2, (2, 6)))
    fits = [
        fit_power_law(sizes, (np.array(losses(law, sizes)) * noise[i]).tolist(), seed=i)
        for i, law in enumerate((SOFTMAX, LINEAR))
    ]
    assert fits[0].b_interval[1] - fits[0].b_interval[0] > 0.02
    assert compare_laws(*fits).verdict == "the points don't tell the exponents apart"
    low, high = fits[0].band([1e6, 1e9])
    assert (low < high).all()


def test_seeds_of_one_size_widen_the_interval_of_two_sizes() -> None:
    one_seed = fit_power_law([1e6, 1e8], [3.0, 2.0])
    seeds = fit_power_law([1e6, 1e6, 1e8, 1e8], [2.8, 3.2, 1.9, 2.1])
    assert one_seed.b_interval[1] - one_seed.b_interval[0] == pytest.approx(0, abs=1e-12)
    assert seeds.b_interval[1] - seeds.b_interval[0] > 0.02


def test_fit_is_a_function_of_its_seed() -> None:
    arguments = ([1e6, 1e7, 1e8], [3.0, 2.4, 2.1])
    assert fit_power_law(*arguments, seed=3).b_interval == fit_power_law(*arguments, seed=3).b_interval


@pytest.mark.parametrize(
    ("sizes", "values", "problem"),
    [
        ([1e6], [2.0], "at least 2"),
        ([1e6, 1e6], [2.0, 2.1], "at least 2"),
        ([1e6, 1e7], [2.0], "one loss a size"),
        ([1e6, 1e7], [2.0, float("nan")], "a loss is nan"),
        ([0, 1e7], [2.0, 1.0], "a size is 0"),
    ],
)
def test_points_that_cannot_be_fitted(sizes: list[float], values: list[float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        fit_power_law(sizes, values)


def test_limits_say_what_few_points_cannot_show() -> None:
    three = " ".join(limits_of(fit_power_law(SIZES, losses(SOFTMAX, SIZES))))
    assert "leave 1 degree of freedom" in three
    assert "three numbers for the three points" in three
    assert "One run a size" in three
    two = " ".join(limits_of(fit_power_law([1e6, 2e6], [3.0, 2.0])))
    assert "fix a and b exactly" in two
    assert "span only a factor of 2" in two
    sizes = np.repeat(np.geomspace(1e6, 1e9, 6), 2).tolist()
    assert limits_of(fit_power_law(sizes, losses(SOFTMAX, sizes))) == []


@pytest.fixture
def sized_runs(new_run: NewRun) -> list[Path]:
    folders = []
    for kind, law in (("softmax", SOFTMAX), ("eq7", LINEAR)):
        for size in map(int, SIZES):
            run = new_run(f"{kind}-{size}").start(num_parameters=size, attention={"kind": kind})
            run.train(1000, law[0] * size ** -law[1]).eval(
                1000, "validation", loss=law[0] * size ** -law[1] + 1
            )
            folders.append(run.end(1000).folder)
    return folders


def test_runs_are_fitted_drawn_and_written(sized_runs: list[Path], tmp_path: Path) -> None:
    summary = write_fit(sized_runs, tmp_path / "fit")
    assert [path.name for path in summary.paths] == ["scaling.json", "scaling.png", "scaling.svg"]
    content = json.loads(summary.paths[0].read_text())
    assert content["laws"]["softmax"]["a"] == pytest.approx(593, rel=1e-6)
    assert content["laws"]["Eq. 7"]["b"] == pytest.approx(0.332, rel=1e-6)
    with Image.open(summary.paths[1]) as image:
        image.load()
    assert "loss ratio 1.05" in summary.text
    assert "softmax; Eq. 7: 3 sizes for 2 numbers" in summary.text


def test_fit_over_another_loss(sized_runs: list[Path]) -> None:
    runs = read_runs(sized_runs)
    points = fit_runs(runs, loss="validation").points
    assert points[0].loss == pytest.approx(593 * 22e6**-0.362 + 1)
    with pytest.raises(RunError, match="it has validation, train"):
        fit_runs(runs, loss="retrieval")


def test_fit_says_when_the_batch_moves_the_floor(new_run: NewRun) -> None:
    folders = []
    for size, batch in ((10**6, 128), (10**8, 64)):
        run = new_run(f"run-{size}").start(num_parameters=size, global_batch_size=batch)
        folders.append(run.train(1000, 3.0 if size < 10**7 else 2.0).end(1000).folder)
    assert any("ln B, moves" in limit for limit in fit_runs(read_runs(folders)).limits)


def test_kind_with_one_size_is_left_out_by_name(sized_runs: list[Path]) -> None:
    scaling = fit_runs(read_runs(sized_runs[:4]))
    assert list(scaling.laws) == ["softmax"]
    assert any(limit.startswith("Eq. 7: not fitted") for limit in scaling.limits)
    with pytest.raises(RunError, match="nothing to fit"):
        fit_runs(read_runs(sized_runs[2:4]))


def test_run_that_ended_not_finite_cannot_be_a_point(sized_runs: list[Path], new_run: NewRun) -> None:
    broken = new_run("nan").start().train(1000, None).end(1000, "non_finite")
    with pytest.raises(RunError, match="nan: its train loss is not finite"):
        fit_runs(read_runs([*sized_runs, broken.folder]))
