"""Scaling-law fits: published laws recovered from their own points, honest intervals, plain limits."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from run_writer import NewRun

from clip_la.report import write_fit
from clip_la.report.fit import fit_floor_law, fit_power_law, limits_of
from clip_la.report.law_comparison import compare_laws
from clip_la.report.runs import RunError, read_runs
from clip_la.report.scaling import ScalingPoint, fit_points, fit_runs
from clip_la.report.scaling_files import scaling_figure

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
    """5 % at S/16 and 14 % at L/16; three exact points still prove nothing."""
    laws = [fit_power_law(SIZES, losses(law, SIZES), stream=i) for i, law in enumerate((SOFTMAX, LINEAR))]
    found = compare_laws(*laws, at=[1e9])
    assert [p.ratio.value for p in found.within] == pytest.approx([1.05, 1.14], abs=0.01)
    assert [p.size for p in found.predictions] == pytest.approx([22e6, 304e6, 1e9, 3.04e9])
    assert [p.is_beyond for p in found.predictions] == [False, False, True, True]
    assert found.predictions[2].ratio.value == pytest.approx(376 / 593 * 1e9**0.03)
    assert found.exponent_difference == pytest.approx(-0.03)
    assert (found.a_ratio.value, found.b_ratio.value) == pytest.approx((376 / 593, 0.332 / 0.362))
    assert "too few to be sure" in found.verdict
    said = " ".join(found.sentences("softmax", "LA"))
    assert "its loss is 5.3 % above at N = 22 M and 13.9 % above at N = 304 M" in said
    assert "the loss of LA falls more slowly with size" in said
    assert "a hint and no proof" in said


@pytest.mark.parametrize("law", [SOFTMAX, LINEAR])
def test_laws_with_a_floor_are_recovered(law: tuple[float, float]) -> None:
    sizes = np.geomspace(1e6, 1e9, 6).tolist()
    for floor in (0.0, 0.3):
        fit = fit_floor_law(sizes, [loss + floor for loss in losses(law, sizes)], num_draws=50)
        assert fit.a == pytest.approx(law[0], rel=2e-3)
        assert fit.b == pytest.approx(law[1], rel=2e-4)
        assert fit.c == pytest.approx(floor, abs=1e-3)
        assert fit.max_error < 1e-4
        assert (fit.problem is None) == (floor > 0)


def test_floor_that_the_points_cannot_determine_says_so() -> None:
    three = fit_floor_law(SIZES, losses(SOFTMAX, SIZES), num_draws=20)
    assert "three sizes for three numbers" in str(three.problem)
    rng = np.random.default_rng(0)
    sizes = np.geomspace(1e6, 1e8, 5)
    noisy = (593 * sizes**-0.362 + 0.3) * np.exp(rng.normal(0, 0.1, 5))
    vague = fit_floor_law(sizes.tolist(), noisy.tolist(), num_draws=200)
    assert vague.problem is not None
    assert vague.c >= 0
    exact = fit_floor_law(sizes.tolist(), losses(SOFTMAX, sizes.tolist()), num_draws=20)
    assert exact.problem == "no floor is seen: c = 0 fits best"
    rising = fit_floor_law(sizes.tolist(), [1.0, 1.1, 1.2, 1.3, 1.4], num_draws=20)
    assert rising.problem is not None
    with pytest.raises(ValueError, match="at least 3"):
        fit_floor_law([1e6, 1e8], [3.0, 2.0])


def test_floor_is_the_least_squares_solution() -> None:
    """No (a, b, c) nearby, and none of a coarse grid, has a smaller error."""
    rng = np.random.default_rng(1)
    sizes = np.geomspace(1e6, 1e9, 6)
    noisy = (200 * sizes**-0.3 + 0.5) * np.exp(rng.normal(0, 0.02, 6))

    def error(a: float, b: float, c: float) -> float:
        return float(((a * sizes**-b + c) / noisy - 1) @ ((a * sizes**-b + c) / noisy - 1))

    fit = fit_floor_law(sizes.tolist(), noisy.tolist(), num_draws=20)
    best = error(fit.a, fit.b, fit.c)
    for b in np.linspace(0.02, 1.5, 60):
        for c in np.linspace(0, noisy.min(), 40):
            x = sizes**-b / noisy
            a = float(x @ (1 - c / noisy) / (x @ x))
            assert error(a, float(b), float(c)) >= best - 1e-9


def test_sizes_off_the_law_in_both_kinds_move_both() -> None:
    """The draws of sizes are shared, so the same deviation cancels in the comparison."""
    sizes = np.geomspace(1e6, 1e9, 6).tolist()
    bent = np.array([1.0, 1.1, 0.9, 1.1, 0.95, 1.0])
    laws = [
        fit_power_law(sizes, (np.array(losses(law, sizes)) * bent).tolist(), stream=i)
        for i, law in enumerate((SOFTMAX, LINEAR))
    ]
    low, high = compare_laws(*laws).exponent_interval
    assert laws[0].b_interval[1] - laws[0].b_interval[0] > 0.01
    assert (low, high) == pytest.approx((-0.03, -0.03), abs=1e-9)


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
        fit_power_law(sizes, (np.array(losses(law, sizes)) * noise[i]).tolist(), stream=i)
        for i, law in enumerate((SOFTMAX, LINEAR))
    ]
    assert fits[0].b_interval[1] - fits[0].b_interval[0] > 0.02
    found = compare_laws(*fits)
    assert found.verdict == "the points don't tell the exponents apart"
    assert "no evidence that they are the same" in found.sentences("a", "b")[1]
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


def test_a_loss_that_rises_with_size_is_said_to() -> None:
    sizes = np.repeat(np.geomspace(1e6, 1e9, 6), 2).tolist()
    (limit,) = limits_of(fit_power_law(sizes, [0.8 * size**0.05 for size in sizes]))
    assert limit.startswith("Loss may not fall with size at all: b = -0.050 [-0.050, -0.050].")


@pytest.fixture
def sized_runs(new_run: NewRun) -> list[Path]:
    """Both kinds at three sizes of the image tower; the training loss lies one above validation's."""
    folders = []
    for kind, law in (("softmax", SOFTMAX), ("eq7", LINEAR)):
        for size in map(int, SIZES):
            loss = law[0] * size ** -law[1]
            towers = {"image": size, "text": 40_000_000}
            run = new_run(f"{kind}-{size}").start(
                num_parameters=size + 40_000_001, tower_parameters=towers, attention={"kind": kind}
            )
            run.train(1000, loss + 1).eval(1000, "validation", loss=loss, num_negatives=255)
            folders.append(run.end(1000).folder)
    return folders


def test_runs_are_fitted_drawn_and_written(sized_runs: list[Path], tmp_path: Path) -> None:
    summary = write_fit(sized_runs, tmp_path / "fit", at=[1e9])
    names = ["scaling.json", "scaling.csv", "scaling-laws.csv", "scaling.png", "scaling.svg"]
    assert [path.name for path in summary.paths] == names
    content = json.loads(summary.paths[0].read_text())
    assert content["laws"]["softmax"]["a"] == pytest.approx(593, rel=1e-6)
    assert content["laws"]["Eq. 7"]["b"] == pytest.approx(0.332, rel=1e-6)
    assert content["points"][0]["parameters"] == {
        "image": 22_000_000,
        "text": 40_000_000,
        "total": 62_000_001,
    }
    assert "three sizes for three numbers" in content["laws_with_floor"]["softmax"]["problem"]
    with summary.paths[1].open(newline="") as file:
        first = next(csv.DictReader(file))
    assert float(first["law"]) == pytest.approx(float(first["loss"]))
    assert (first["image_parameters"], first["num_negatives"]) == ("22000000", "255")
    with summary.paths[2].open(newline="") as file:
        assert [row["attention"] for row in csv.DictReader(file)] == ["softmax", "Eq. 7"] * 2
    with Image.open(summary.paths[3]) as image:
        image.load()
    assert "L: validation loss at 255 negatives; N: parameters of the image tower" in summary.text
    assert "loss at N = 1 G, beyond the points" in summary.text
    assert "softmax; Eq. 7: 3 sizes for 2 numbers" in summary.text


def test_equations_stand_in_the_legend(sized_runs: list[Path]) -> None:
    (axes,) = scaling_figure(fit_runs(read_runs(sized_runs))).axes
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [r"$593\,N^{-0.362}$", r"$376\,N^{-0.332}$"]


def test_fit_over_another_loss_and_another_size(sized_runs: list[Path]) -> None:
    runs = read_runs(sized_runs)
    points = fit_runs(runs, loss="train").points
    assert points[0].loss == pytest.approx(593 * 22e6**-0.362 + 1)
    total = fit_runs(runs, parameters="total").laws["softmax"]
    assert total.size_range == (62_000_001, 344_000_001)
    with pytest.raises(RunError, match="it has validation, train: choose with --loss"):
        fit_runs(runs, loss="retrieval")
    with pytest.raises(RunError, match=r"1 model size.*at least 2"):
        fit_runs(runs, parameters="text")


def test_losses_over_other_negatives_are_refused_by_name(sized_runs: list[Path], new_run: NewRun) -> None:
    other = new_run("other").start(tower_parameters={"image": 10**9, "text": 1})
    other.train(1000, 1.0).eval(1000, "validation", loss=0.3, num_negatives=127).end(1000)
    with pytest.raises(RunError, match=r"same number of negatives: 255 \(softmax-22000000.*; 127 \(other\)"):
        fit_runs(read_runs([*sized_runs, other.folder]))


def test_size_that_is_not_known_is_an_error_that_says_what_is(new_run: NewRun) -> None:
    run = new_run("old").start(tower_parameters=None, sample_flops=None)
    run.train(1000, 1.0).eval(1000, "validation", loss=0.3).end(1000)
    with pytest.raises(RunError, match=r"image parameters is not known \(known: total\)"):
        fit_runs(read_runs([run.folder]))


def test_fit_says_when_the_batch_moves_the_floor(new_run: NewRun) -> None:
    folders = []
    for size, batch in ((10**6, 128), (10**8, 64)):
        run = new_run(f"run-{size}").start(num_parameters=size, global_batch_size=batch)
        folders.append(run.train(1000, 3.0 if size < 10**7 else 2.0).end(1000).folder)
    limits = fit_runs(read_runs(folders), loss="train", parameters="total").limits
    assert any("ln B, moves" in limit for limit in limits)
    assert any("differ in the global batch size" in limit for limit in limits)


def test_kind_with_one_size_is_left_out_by_name(sized_runs: list[Path]) -> None:
    scaling = fit_runs(read_runs(sized_runs[:4]))
    assert list(scaling.laws) == ["softmax"]
    assert any(limit.startswith("Eq. 7: not fitted") for limit in scaling.limits)
    with pytest.raises(RunError, match="nothing to fit"):
        fit_runs(read_runs(sized_runs[2:4]))


def test_run_that_ended_not_finite_cannot_be_a_point(sized_runs: list[Path], new_run: NewRun) -> None:
    broken = new_run("nan").start().train(1000, None).end(1000, "non_finite")
    with pytest.raises(RunError, match="nan: its train loss is not finite"):
        fit_runs(read_runs([*sized_runs, broken.folder]), loss="train")


def test_damaged_run_is_left_out_of_the_fit_by_name(
    sized_runs: list[Path], new_run: NewRun, tmp_path: Path
) -> None:
    broken = new_run("broken").start().raw("oops\n").train(100, 3.0).folder
    text = write_fit([*sized_runs, broken], tmp_path / "fit").text
    assert "- broken is not in this report: " in text


def test_points_of_any_origin_are_fitted() -> None:
    sizes = np.geomspace(1e6, 1e9, 5).astype(int).tolist()
    points = [
        ScalingPoint(f"{kind}-{n}", kind, 0, {"image": n}, loss)
        for kind, law in (("softmax", SOFTMAX), ("LA", LINEAR))
        for n, loss in zip(sizes, losses(law, sizes), strict=True)
    ]
    scaling = fit_points(points, loss_name="test")
    assert scaling.comparisons["softmax", "LA"].verdict == "the points tell the exponents apart"
    assert scaling.floors["LA"].problem == "no floor is seen: c = 0 fits best"


def test_a_floor_that_may_explain_unequal_exponents_is_named() -> None:
    """One exponent, two floors: without them the exponents look different."""
    sizes = [int(n) for n in np.geomspace(1e6, 1e9, 6)]
    points = [
        ScalingPoint(f"{kind}-{n}", kind, 0, {"image": n}, 300 * n**-0.35 + floor)
        for kind, floor in (("softmax", 0.2), ("LA", 0.5))
        for n in sizes
    ]
    scaling = fit_points(points, loss_name="test")
    assert scaling.comparisons["softmax", "LA"].verdict == "the points tell the exponents apart"
    assert any("may be the floor's bend" in limit for limit in scaling.limits)
