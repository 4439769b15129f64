"""The H200 scale without a cluster: its plan, what it would submit, and the figures of stand-in runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from finished_run import EQ7, SOFTMAX, write_run

from clip_la.bundle import resolve_model_config
from clip_la.cli import main
from clip_la.config_sources import load_run_config
from clip_la.exit_codes import EXIT_FINISHED, EXIT_USAGE
from clip_la.reproduce.h200_plan import EXTRA_SIZES, KINDS, SHIPPED_SIZES, ClusterRun, configs_of, extra_model

REPO_ROOT = Path(__file__).resolve().parents[2]
DATA = ["--data", "/data/{00000..00009}.tar", "--val-data", "/data/val.tar"]


def reproduce(out: Path, *flags: str, repo: Path = REPO_ROOT) -> int:
    return main(["reproduce", "--scale", "h200", "--out", str(out), "--repo", str(repo), *flags])


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sbatch that notes its arguments and answers a job number; the file that it notes them in."""
    notes, folder = tmp_path / "sbatch.log", tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {notes}\necho 7\n')
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return notes


def test_a_dry_run_prints_runs_costs_and_commands_and_submits_nothing(
    tmp_path: Path, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(tmp_path / "out", *DATA, "--sbatch=--account=x", "--dry-run") == EXIT_FINISHED
    printed = capsys.readouterr().out
    assert not cluster.exists()
    for size in SHIPPED_SIZES:
        for ending in KINDS.values():
            assert f"vit-{size}-16-{ending} " in printed
    assert "needs a Slurm cluster" in printed
    assert "GPU-hours" in printed
    compare = [line for line in printed.splitlines() if "compare.sbatch" in line]
    assert len(compare) == 2
    assert all("--account=x -- '--train-data=/data/{00000..00009}.tar'" in line for line in compare)
    assert "clip-la bench --level operator" in printed


def test_one_panel_needs_only_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce(tmp_path, *DATA, "--panels", "convergence", "--dry-run") == EXIT_FINISHED
    printed = capsys.readouterr().out
    assert "vit-b-16-la" in printed
    assert "vit-l-16" not in printed
    assert "clip-la bench" not in printed


def test_extra_sizes_are_models_and_configs_that_can_be_used(tmp_path: Path) -> None:
    run = ClusterRun(tmp_path, REPO_ROOT, {"train_data": "a.tar"}, 4, 8, (), ("fit",))
    paths = {key: path for key, path in configs_of(run).items() if key[0] in EXTRA_SIZES}
    assert len(paths) == 2 * 3
    base = load_run_config(REPO_ROOT / "configs" / "laion400m" / "vit-b-16-softmax.yaml", {})
    for (size, kind), path in paths.items():
        config = load_run_config(path, run.flags)
        assert config.name == f"vit-{size}-16-{KINDS[kind]}"
        assert (config.batch_size, config.lr, config.epochs) == (base.batch_size, base.lr, base.epochs)
        model = resolve_model_config(config.model)
        assert model["vision_cfg"]["width"] == EXTRA_SIZES[size].width
        assert (model.get("attention") is None) == (kind == "softmax")
    assert extra_model("ti", "softmax")["text_cfg"]["heads"] == 4


def test_jobs_are_submitted_once(tmp_path: Path, cluster: Path) -> None:
    out = tmp_path / "out"
    assert reproduce(out, *DATA) == EXIT_FINISHED
    submitted = cluster.read_text().splitlines()
    # Each compare.sbatch submits an array and a report; the bench job is one.
    assert [line.split()[0] for line in submitted] == ["--parsable"] * 4 + ["--job-name=clip_la_bench"]
    assert "--array=0-11%2" in submitted[0]
    assert "--array=0-5%2" in submitted[2]
    assert reproduce(out, *DATA) == EXIT_FINISHED
    assert cluster.read_text().splitlines() == submitted
    assert len(json.loads((out / "submitted.json").read_text())) == 3


def test_figures_are_made_of_the_runs_that_have_finished(
    tmp_path: Path, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    sizes = {"ti": 5_000_000, "s": 22_000_000, "m": 40_000_000, "b": 86_000_000, "l": 300_000_000}
    for size, parameters in sizes.items():
        for kind, attention in (("softmax", SOFTMAX), ("la", EQ7)):
            loss = 593 * parameters**-0.362 * (1.0 if kind == "softmax" else 1.02)
            write_run(
                out / "runs" / f"vit-{size}-16-{kind}", attention, [5.0, loss], image_parameters=parameters
            )
    write_run(out / "runs" / "vit-b-16-la-eq4", {"kind": "eq4"}, [5.0], reason="signal")
    assert reproduce(out, *DATA, "--panels", "convergence,fit") == EXIT_FINISHED
    printed = capsys.readouterr().out
    assert "AGREES      The same scaling law" in printed
    content = json.loads((out / "reproduction.json").read_text())
    assert list(content["panels"]) == ["convergence", "fit"]
    assert len(content["panels"]["fit"]["numbers"]["points"]) == 10
    assert "vit-b-16-la-eq4 (100% done)" in content["warning"]
    assert "vit-l-16-la-eq4 (not started)" in content["warning"]
    assert content["panels"]["fit"]["facts"]["Data"] == "a.tar, held out b.tar"


@pytest.mark.parametrize(
    ("flags", "repo", "message"),
    [(DATA, "elsewhere", "give a clone of the repository with --repo"), ([], "", "needs --data")],
)
def test_what_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], repo: str, message: str
) -> None:
    assert reproduce(tmp_path / "out", *flags, repo=tmp_path / repo if repo else REPO_ROOT) == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_a_machine_without_slurm_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert reproduce(tmp_path / "out", *DATA, "--panels", "time") == EXIT_USAGE
    assert "no sbatch on this machine" in capsys.readouterr().err


def test_the_documentation_s_page_is_made_of_a_folder(tmp_path: Path) -> None:
    """The script puts text and figures between the marks, and again puts the same."""
    out, docs = tmp_path / "out", tmp_path / "docs"
    (out / "time").mkdir(parents=True)
    (out / "time" / "time.png").write_bytes(b"png")
    (out / "reproduction.md").write_text("## Time\n\n![x](time/time.png)\n")
    (docs / "images").mkdir(parents=True)
    script = REPO_ROOT / "benchmarks" / "reproduction_page.py"
    text = (REPO_ROOT / "docs" / "reproduction.md").read_text()
    (docs / "reproduction.md").write_text(text)
    command = [sys.executable, str(script), str(out), "--docs", str(docs)]
    subprocess.run(command, check=True)
    once = (docs / "reproduction.md").read_text()
    assert "## Time\n\n![x](images/reproduction-time.png)" in once
    assert (docs / "images" / "reproduction-time.png").read_bytes() == b"png"
    subprocess.run(command, check=True)
    assert (docs / "reproduction.md").read_text() == once
