"""The whole CPU scale in little: with a stand-in for training, and once for real."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from clip_la.cli import main
from clip_la.exit_codes import EXIT_FINISHED, EXIT_USAGE
from clip_la.reproduce import child, cpu
from clip_la.reproduce.budget import FULL, Budget
from clip_la.reproduce.estimate import estimated_seconds
from clip_la.reproduce.kinds import MODELS
from clip_la.reproduce.settings import learning_rate, training_flags

TINY = Budget(
    lengths=(256, 1024, 2048),
    bench_seconds=0.01,
    max_call_seconds=60.0,
    num_pairs=128,
    convergence_samples=128,
    num_points=2,
    seeds=(0, 1),
    fit_samples=64,
    fit_kinds=("softmax", "eq7"),
    fit_widths=(32, 64),
    fit_seeds=(0,),
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "QUICK", TINY)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(Path(__file__).with_name("stand_in_training.py"))
    monkeypatch.setattr(child, "train_command", lambda settings: [sys.executable, script, str(settings)])


def reproduce(out: Path, *flags: str) -> int:
    return main(["reproduce", "--quick", "--out", str(out), *flags])


def test_a_training_is_one_pass_with_held_out_losses_inside_it() -> None:
    flags = training_flags(16_000, num_points=8)
    assert (flags["epochs"], flags["train_num_samples"], flags["val_every_samples"]) == (1, 8 * 1984, 1984)
    assert flags["warmup"] == 49  # of 248 steps


def test_wider_models_learn_at_lower_rates() -> None:
    assert [learning_rate(width) for width in (32, 64, 128, 256)] == [1e-3, 1e-3, 5e-4, 2.5e-4]


@pytest.mark.usefixtures("tiny", "stand_in")
def test_one_command_makes_everything_and_again_makes_nothing_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert reproduce(out) == EXIT_FINISHED
    printed = capsys.readouterr().out
    assert "DISAGREES   Eq. 7 converges like softmax." in printed
    runs = sorted(path.name for path in (out / "runs").iterdir() if path.is_dir())
    assert len(runs) == len(MODELS) * 2 + 2 * 2
    assert not list((out / "runs").glob("*/checkpoints"))
    content = json.loads((out / "reproduction.json").read_text())
    assert list(content["panels"]) == ["time", "convergence", "fit"]
    assert content["warning"].startswith("A quick run")
    assert "quick run" in (out / "reproduction.html").read_text()
    assert content["panels"]["convergence"]["numbers"]["eq7"]["losses"][-1] == pytest.approx(
        [1.2, 1.2012], rel=0.3
    )
    made = {
        path: path.stat().st_mtime_ns
        for path in [*out.glob("runs/*/metrics.jsonl"), out / "time" / "bench.json"]
    }
    assert reproduce(out) == EXIT_FINISHED
    assert {path: path.stat().st_mtime_ns for path in made} == made


@pytest.mark.usefixtures("tiny", "stand_in")
def test_panels_can_be_chosen_and_a_lost_run_is_trained_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert reproduce(out, "--panels", "fit") == EXIT_FINISHED
    assert list(json.loads((out / "reproduction.json").read_text())["panels"]) == ["fit"]
    lost = out / "runs" / "width32-eq7-seed0"
    for path in sorted(lost.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert reproduce(out, "--panels", "fit") == EXIT_FINISHED
    assert (lost / "metrics.jsonl").exists()


@pytest.mark.usefixtures("tiny", "stand_in")
def test_a_folder_of_other_options_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert reproduce(out, "--panels", "fit") == EXIT_FINISHED
    assert main(["reproduce", "--out", str(out), "--panels", "fit"]) == EXIT_USAGE
    assert "other options: quick True, now False" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "a.tar"], "--data needs --val-data"),
        (["--data", "a.tar", "--val-data", "b.tar", "--classnames", "c.txt"], "--classnames belongs to"),
        (["--val-data", "b.tar"], "go with --data"),
        (["--processes", "0"], "--processes is 0"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert reproduce(tmp_path / "out", *flags) == EXIT_USAGE
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_unknown_panel_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["reproduce", "--panels", "time,speed"])
    assert stopped.value.code == EXIT_USAGE
    assert "no panel speed; there are time, convergence, fit" in capsys.readouterr().err


def test_the_full_budget_fits_an_hour_of_two_cores() -> None:
    assert sum(estimated_seconds(FULL, processes=2).values()) < 3600
    assert len(FULL.fit_widths) >= 5
    assert len(FULL.seeds) >= 3


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_it_trains_for_real(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert reproduce(out, "--processes", "2") == EXIT_FINISHED
    numbers = json.loads((out / "reproduction.json").read_text())["panels"]
    for kind in MODELS:
        found = numbers["convergence"]["numbers"][kind]
        assert found["samples"] == [64, 128]
        assert all(0 < loss < 20 for losses in found["losses"] for loss in losses)
        assert len(found["top1"]) == 2
    sizes = {point["parameters"]["image"] for point in numbers["fit"]["numbers"]["points"]}
    assert len(sizes) == 2
