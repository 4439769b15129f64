"""`clip-la submit`: the plan, its refusals, and the command that is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from clip_la.cli import main


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for sbatch that notes its arguments, and an sbatch file."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "sbatch"
    command.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >{tmp_path}/called\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    (tmp_path / "train.sbatch").touch()
    return tmp_path / "called"


def test_dry_run_shows_everything_and_submits_nothing(
    config_file: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", str(config_file), "--nodes", "1", "--gpus-per-node", "3", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "6 = 2 x 1 micro-steps x 3 GPUs",
        "(estimate)",
        "saved every 1 epochs",
        "would run: sbatch",
    ):
        assert words in shown
    assert not sbatch.exists()


def test_a_model_that_cannot_be_estimated_has_no_plan(
    config_file: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--nodes", "1", "--gpus-per-node", "1", "--dry-run", "--model", "RN50"]
    assert main(["submit", str(config_file), *flags]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("warning: no plan of RN50: only native ViTs")
    assert "would run: sbatch" in shown


def test_submits_with_the_flags_after_the_config(config_file: Path, sbatch: Path) -> None:
    options = ["--nodes", "1", "--gpus-per-node", "2", "--time", "1:00:00", "--sbatch", "--account=x -p y"]
    script = str(sbatch.with_name("train.sbatch"))
    arguments = ["submit", str(config_file), *options, "--script", script, "--lr", "1e-4", "--name", "z"]
    assert main(arguments) == 0
    called = sbatch.read_text().split("\n")
    assert called[:4] == ["--job-name=z", "--nodes=1", "--gpus-per-node=2", "--ntasks-per-node=2"]
    assert called[4:8] == ["--dependency=singleton", "--time=1:00:00", "--account=x", "-p"]
    assert called[9:] == [script, str(config_file), "--lr", "1e-4", "--name", "z", ""]


def test_a_job_with_problems_is_not_submitted(
    config_file: Path, sbatch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", str(config_file), "--nodes", "1", "--gpus-per-node", "4"]) == 2
    assert "can't be shared by 4 readers" in capsys.readouterr().out
    assert not sbatch.exists()
    assert main(["submit", str(config_file), "--nodes", "0"]) == 2
    assert "--nodes 0" in capsys.readouterr().err


def test_without_slurm_it_says_where_to_go(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    flags = ["--nodes", "1", "--gpus-per-node", "1"]
    assert main(["submit", str(config_file), *flags, "--script", str(tmp_path / "missing.sbatch")]) == 2
    assert "missing.sbatch here" in capsys.readouterr().err
    (tmp_path / "train.sbatch").touch()
    assert main(["submit", str(config_file), *flags, "--script", str(tmp_path / "train.sbatch")]) == 2
    assert "no sbatch on this machine" in capsys.readouterr().err
