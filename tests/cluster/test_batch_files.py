"""The shell in slurm/ with stand-ins for Slurm's commands: layout, verdicts, refusals, odd paths."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]

COMMANDS = {
    "scontrol": """
        case "$1 ${2:-}" in
            "show job")
                if [ -s "$STUB/away" ]; then truncate -s -1 "$STUB/away"; exit 1; fi
                echo "   JobState=$(cat "$STUB/state") Reason=None"
                echo "   Command=$BATCH a.yaml --x=y" ;;
            "show hostnames") echo node1 ;;
            requeue*) echo "$2" >>"$STUB/requeued"; exit "${REQUEUE_CODE:-0}" ;;
            "ping ") echo 'Slurmctld(primary) at here is UP' ;;
        esac""",
    "srun": """
        echo "$@" >>"$STUB/srun"
        env >"$STUB/environment"
        tasks=1
        while [[ $1 == --* ]]; do
            [[ $1 != --ntasks=* ]] || tasks=${1#*=}
            shift
        done
        for ((SLURM_PROCID = 0; SLURM_PROCID < tasks; SLURM_PROCID++)); do
            export SLURM_PROCID
            "$@" || code=$?
        done
        exit "${code:-0}" """,
    "python": """
        case "$*" in
            *cluster.preflight*) mkdir -p "$RUN/slurm"; echo "$RUN"; exit "${PREFLIGHT_CODE:-0}" ;;
            *clip_la.cli*) echo "$@" >>"$STUB/tasks"; codes=($TASK_CODES); exit "${codes[$SLURM_PROCID]}" ;;
        esac
        exec "$REAL_PYTHON" "$@" """,
    "squeue": 'echo "${HOLDER_STATE:-}"',
    "sbatch": """echo "$@" >>"$STUB/submitted"; echo 7""",
    "sleep": "true",
}


@dataclass
class Stage:
    """A clone with a blank in its path, a run folder with one too, and the stand-ins on PATH."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def call(self, batch_file: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a batch file as a job of 2 nodes x 2 GPUs, from a copy, as Slurm does."""
        copy = self.folder / "slurm_script"
        copy.write_bytes((self.folder / "a clone" / "slurm" / batch_file).read_bytes())
        command = {"BATCH": f"{self.folder}/a clone/slurm/{batch_file}"}
        return self.bash(copy, *arguments, **{**command, **environment})

    def bash(self, script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", script, *arguments],
            env={**self.environment, **environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def noted(self, name: str) -> str:
        file = self.folder / "stub" / name
        return file.read_text() if file.exists() else ""

    def set(self, name: str, text: str) -> None:
        (self.folder / "stub" / name).write_text(text)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    for name in ("bin", "stub", "a clone"):
        (tmp_path / name).mkdir()
    for name, body in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "a clone" / "slurm").symlink_to(REPO_ROOT / "slurm")
    (tmp_path / "site.sh").write_text("export SITE=read\n")
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPO_ROOT / "src"),
        "REAL_PYTHON": sys.executable,
        "STUB": str(tmp_path / "stub"),
        "RUN": str(tmp_path / "a run"),
        "TASK_CODES": "0 0 0 0",
        "CLIP_LA_SITE": str(tmp_path / "site.sh"),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "5",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_CPUS_ON_NODE": "9",
    }
    made = Stage(tmp_path, environment)
    made.set("state", "RUNNING")
    return made


def test_layout_follows_the_allocation(stage: Stage) -> None:
    odd = {"SLURM_EXPORT_ENV": "NONE", "SLURM_NTASKS": "99", "SLURM_GPUS": "4", "SLURM_GPUS_PER_TASK": "1"}
    done = stage.call("train.sbatch", "a.yaml", "--lr", "1 e", **odd)
    assert done.returncode == 0, done.stderr
    assert "2 nodes x 2 tasks x 4 CPUs, 2 GPUs a node" in done.stderr
    assert stage.noted("tasks") == "-m clip_la.cli train --config a.yaml --lr 1 e\n" * 4
    training = stage.noted("srun").splitlines()[1]
    assert training.startswith(
        "--nodes=2 --ntasks=4 --ntasks-per-node=2 --gpu-bind=none --kill-on-bad-exit=1"
    )
    environment = stage.noted("environment").splitlines()
    assert {"MASTER_ADDR=node1", "MASTER_PORT=20080", "SRUN_CPUS_PER_TASK=4", "SITE=read"} <= set(environment)
    assert not [line for line in environment if line.split("=")[0] in odd]


def test_without_gpus_the_tasks_asked_for_count(stage: Stage) -> None:
    without = {"SLURM_GPUS_ON_NODE": "", "SLURM_NTASKS_PER_NODE": "3", "TASK_CODES": "0 0 0 0 0 0"}
    assert (
        "2 nodes x 3 tasks x 3 CPUs, 0 GPUs a node" in stage.call("train.sbatch", "a.yaml", **without).stderr
    )
    refused = stage.call("train.sbatch", "a.yaml", **without, SLURM_CPUS_ON_NODE="2")
    assert refused.returncode == 2
    assert "2 CPUs a node for 3 tasks; ask for more with --cpus-per-task" in refused.stderr


@pytest.mark.parametrize("batch", ["./train.sbatch", "train.sbatch"])
def test_a_batch_file_given_by_a_relative_path_finds_the_others(stage: Stage, batch: str) -> None:
    """As with sbatch --chdir, when Slurm keeps the path as it was typed."""
    submit_dir = str(stage.folder / "a clone" / "slurm")
    done = stage.call("train.sbatch", "a.yaml", BATCH=batch, SLURM_SUBMIT_DIR=submit_dir)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("task_codes", "code", "requeued", "reason"),
    [
        ("0 0 0 0", 0, "", "finished"),
        ("75 75 75 75", 75, "5\n", "stopped by a signal and saved"),
        ("0 0 1 4", 75, "5\n", "crashed: of the tasks ended 2 with 0, 1 with 1, 1 with 4"),
        ("2 4 4 4", 2, "", "the config can't be used"),
        ("3 3 3 3", 3, "", "not finite"),
    ],
)
def test_what_becomes_of_a_job(stage: Stage, task_codes: str, code: int, requeued: str, reason: str) -> None:
    done = stage.call("train.sbatch", "a.yaml", TASK_CODES=task_codes)
    assert done.returncode == code, done.stderr
    assert stage.noted("requeued") == requeued
    assert reason in done.stderr


def test_a_job_that_slurm_ends_leaves_the_rest_to_slurm(stage: Stage) -> None:
    stage.set("state", "CANCELLED")
    done = stage.call("train.sbatch", "a.yaml", TASK_CODES="75 75 75 75")
    assert (done.returncode, stage.noted("requeued")) == (75, "")
    assert "Slurm has this job as CANCELLED" in done.stderr


def test_a_controller_that_is_away_is_waited_for(stage: Stage) -> None:
    (stage.folder / "site.sh").write_text('echo -n xxx >"$STUB/away"\n')
    done = stage.call("train.sbatch", "a.yaml")
    assert done.returncode == 0, done.stderr
    assert stage.noted("away") == ""
    (stage.folder / "site.sh").write_text('printf "%100s" x >"$STUB/away"\n')
    done = stage.call("train.sbatch", "a.yaml")
    assert done.returncode == 75
    assert "Slurm has this job as gone" in done.stderr


def test_a_job_that_may_not_be_requeued_says_how_to_go_on(stage: Stage) -> None:
    done = stage.call("train.sbatch", "a.yaml", TASK_CODES="75 75 75 75", REQUEUE_CODE="1")
    assert done.returncode == 75
    assert "can't requeue this job; submit the same command again" in done.stderr


def test_nothing_is_trained_after_a_failed_preflight(stage: Stage) -> None:
    done = stage.call("train.sbatch", "a.yaml", PREFLIGHT_CODE="2")
    assert (done.returncode, stage.noted("tasks"), stage.noted("requeued")) == (2, "", "")
    assert "the preflight failed: nothing was trained" in done.stderr


def test_a_run_that_another_job_trains_is_left_alone(stage: Stage) -> None:
    holder = stage.folder / "a run" / "slurm" / "job"
    holder.parent.mkdir(parents=True)
    holder.write_text("4\n")
    done = stage.call("train.sbatch", "a.yaml", HOLDER_STATE="RUNNING")
    assert (done.returncode, stage.noted("tasks")) == (2, "")
    assert "a run is being trained by job 4 (RUNNING)" in done.stderr
    assert stage.call("train.sbatch", "a.yaml", HOLDER_STATE="").returncode == 0
    assert holder.read_text() == "5\n"


@pytest.mark.parametrize(
    ("environment", "site", "message"),
    [
        ({"CLIP_LA_SITE": "nowhere.sh"}, "", "CLIP_LA_SITE names nowhere.sh, which is not there"),
        ({}, "CONTAINER=docker", "CONTAINER is 'docker' in"),
    ],
)
def test_a_wrong_site_file_is_named(
    stage: Stage, environment: dict[str, str], site: str, message: str
) -> None:
    (stage.folder / "site.sh").write_text(site)
    done = stage.call("train.sbatch", "a.yaml", **environment)
    assert (done.returncode, stage.noted("srun")) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize("batch_file", ["train.sbatch", "eval.sbatch", "report.sbatch"])
def test_usage(stage: Stage, batch_file: str) -> None:
    done = stage.call(batch_file)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
    assert batch_file in done.stderr


def test_evaluation_takes_the_tasks_exit_code(stage: Stage) -> None:
    done = stage.call("eval.sbatch", "logs/x", "--zeroshot", "a tree", TASK_CODES="0 1 0 0")
    assert done.returncode == 1
    assert stage.noted("tasks") == "-m clip_la.cli eval --checkpoint logs/x --zeroshot a tree\n" * 4
    assert stage.call("eval.sbatch", "--watch", "a run", "--x").returncode == 0
    assert stage.noted("tasks").endswith("-m clip_la.cli watch a run --x\n")


def test_report_leaves_out_runs_that_have_not_begun(stage: Stage) -> None:
    (stage.folder / "one").mkdir()
    (stage.folder / "one" / "metrics.jsonl").touch()
    done = stage.call("report.sbatch", "one", "two", "--out", "there", SLURM_GPUS_ON_NODE="", TASK_CODES="0")
    assert done.returncode == 0, done.stderr
    assert "left out: two has not begun to train" in done.stderr
    assert stage.noted("tasks") == "-m clip_la.cli report one --out there\n"


def test_comparison_submits_an_array_and_its_report(stage: Stage) -> None:
    script = stage.folder / "a clone" / "slurm" / "compare.sbatch"
    done = stage.bash(
        script, "--account=x", "-p", "big", "--nodes=2", "--", "--logs", "some logs", "--lr", "1e-4"
    )
    assert done.returncode == 0, done.stderr
    array, report = stage.noted("submitted").splitlines()
    assert (
        array == f"--parsable --array=0-14%2 --account=x -p big --nodes=2 {script} --logs some logs --lr 1e-4"
    )
    place = "--account=x -p big"  # the report job takes no nodes of GPUs, but the same account
    begin = f"--parsable --dependency=afterany:7 {place} {script.with_name('report.sbatch')}"
    assert report.startswith(f"{begin} some logs/vit-s-16-softmax")
    assert report.endswith("some logs/vit-l-16-la-centred --out some logs/compare-7")


def test_comparison_of_other_configs(stage: Stage) -> None:
    stage.environment["CLIP_LA_CONFIGS"] = "x/a.yaml b.yaml"
    (stage.folder / "x").mkdir()
    for config in ("x/a.yaml", "b.yaml"):
        (stage.folder / config).touch()
    script = stage.folder / "a clone" / "slurm" / "compare.sbatch"
    assert stage.bash(script).returncode == 0
    assert " logs/a logs/b --out" in stage.noted("submitted")
    task = {"SLURM_ARRAY_JOB_ID": "4", "TASK_CODES": "0 0 0 0"}
    assert stage.call("compare.sbatch", "--lr", "1", SLURM_ARRAY_TASK_ID="1", **task).returncode == 0
    assert stage.noted("tasks").startswith("-m clip_la.cli train --config b.yaml --lr 1\n")
    missing = stage.call("compare.sbatch", SLURM_ARRAY_TASK_ID="2", **task)
    assert (missing.returncode, "no config number 2; there are 2" in missing.stderr) == (2, True)


def test_comparison_refuses_what_would_mix_its_runs(stage: Stage) -> None:
    script = stage.folder / "a clone" / "slurm" / "compare.sbatch"
    named = stage.bash(script, "--", "--name", "x")
    assert (named.returncode, stage.noted("submitted")) == (2, "")
    assert "--name x" in named.stderr
    submitted = stage.call("compare.sbatch")  # with sbatch rather than bash
    assert (submitted.returncode, stage.noted("submitted")) == (2, "")
    assert "bash slurm/compare.sbatch" in submitted.stderr
    same = stage.bash(script, CLIP_LA_CONFIGS="x/a.yaml y/a.yaml")
    assert (same.returncode, stage.noted("submitted")) == (2, "")
    assert "a.yaml" in same.stderr
