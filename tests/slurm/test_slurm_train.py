"""slurm/train.sbatch on a real cluster: whatever ends a start, the weights end as if nothing had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from local_cluster import REPO_ROOT, Cluster, wait_until

from clip_la import checkpoint

pytestmark = pytest.mark.slurm
TRAIN = REPO_ROOT / "slurm" / "train.sbatch"


def final_weights(run: Path) -> dict[str, Any]:
    content = checkpoint.read(checkpoint.list_checkpoints(run / "checkpoints")[0])
    return {**content["state_dict"], "progress": content["progress"]}


def starts(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "slurm" / "starts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def straight(cluster: Cluster) -> Path:
    """An uninterrupted run on two nodes."""
    job = cluster.submit(TRAIN, "tiny.yaml", "--name", "straight")
    assert cluster.wait(job) == ("COMPLETED", 0), cluster.output(job)
    return cluster.folder / "logs" / "straight"


def test_two_nodes_train(cluster: Cluster, straight: Path) -> None:
    records = [json.loads(line) for line in (straight / "metrics.jsonl").read_text().splitlines()]
    assert records[0]["world_size"] == 2
    assert records[-1]["reason"] == "finished"
    assert len(starts(straight)) == 1


def test_one_job_through_every_interruption(cluster: Cluster, straight: Path) -> None:
    """A time limit, `scontrol requeue`, a preemption and a node that dies, each in the middle of training."""
    job = cluster.submit(TRAIN, "tiny.yaml", "--name", "hunted", "--epochs", "60")
    trains = " samples ("

    def wait_for_training(start: int) -> None:
        cluster.wait_for_output(job, f"job {job} start {start}:")
        seen = cluster.output(job).count(trains)
        cluster.wait_for_output(job, trains, seen + 3)

    wait_for_training(0)
    cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    cluster.wait_for_output(job, "asking the tasks to save and stop")
    cluster.wait_for_output(job, "stopped by USR1 and saved")
    wait_until(lambda: cluster.show(job, "Restarts") == "1", "requeued by itself")
    cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=20")

    wait_for_training(1)
    cluster.call("scontrol", "requeue", job)
    cluster.wait_for_output(job, "stopped by SIGTERM and saved")

    wait_for_training(2)
    cluster.submit("--partition=urgent", "--gpus-per-node=8", "--output=/dev/null", "--wrap", "true")
    cluster.wait_for_output(job, "stopped by SIGTERM and saved", 2)

    wait_for_training(3)
    cluster.control("crash", "node2")
    wait_until(lambda: "down" in cluster.call("sinfo", "-hNn", "node2", "-o", "%T"), "node2 is down")
    cluster.control("boot", "node2")

    assert cluster.wait(job) == ("COMPLETED", 0), cluster.output(job)
    run = cluster.folder / "logs" / "hunted"
    samples = [start["samples"] for start in starts(run)]
    assert samples == sorted(samples)
    assert len(set(samples)) == len(samples) == 5
    ours, theirs = final_weights(run), final_weights(straight)
    assert ours.pop("progress") == theirs.pop("progress")
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch-sise", "8"], "unknown setting --batch-sise; did you mean --batch-size"),
        (
            ["--train-data", "shards/{00000..00009}.tar"],
            "6 of 10 shards are not there, first shards/00004.tar",
        ),
    ],
)
def test_a_job_that_would_fail_does_so_at_once(cluster: Cluster, flags: list[str], message: str) -> None:
    job = cluster.submit(TRAIN, "tiny.yaml", "--name", "wrong", *flags)
    assert cluster.wait(job) == ("FAILED", 2)
    assert message in cluster.output(job)
    assert cluster.show(job, "Restarts") == "0"


def test_numbers_that_stop_being_finite_are_not_requeued(cluster: Cluster) -> None:
    flags = ["--lr", "1e30", "--max-bad-steps", "3"]
    job = cluster.submit(TRAIN, "tiny.yaml", "--name", "diverged", *flags, nodes=1)
    assert cluster.wait(job) == ("FAILED", 3), cluster.output(job)
    assert "stopped on steps that were not finite" in cluster.output(job)
    assert cluster.show(job, "Restarts") == "0"


def test_two_jobs_with_one_name(cluster: Cluster) -> None:
    first = cluster.submit(TRAIN, "tiny.yaml", "--name", "twice", "--epochs", "10000", nodes=1)
    cluster.wait_for_output(first, " samples (")
    second = cluster.submit(TRAIN, "tiny.yaml", "--name", "twice", nodes=1)
    assert cluster.wait(second) == ("FAILED", 2)
    assert f"is being trained by job {first} (RUNNING)" in cluster.output(second)
    cluster.call("scancel", first)
    assert cluster.wait(first)[0] == "CANCELLED"
    assert cluster.show(first, "Restarts") == "0"


def test_a_job_that_makes_no_progress_gives_up(cluster: Cluster) -> None:
    """Its time limit leaves no time to train, so each start is stopped before the first step."""
    limit = ["--time=1", "--signal=B:USR1@60"]
    flags = ["--name", "stalled", "--workers", "0", "--batch-size", "64", "--epochs", "1000000"]
    crash = {**cluster.environment, "CLIP_LA_SITE": str(cluster.folder / "broken_site.sh")}
    (cluster.folder / "broken_site.sh").write_text(
        (cluster.folder / "site.sh").read_text() + "ulimit -v 3000000\n"
    )
    job = Cluster(cluster.folder, crash).submit(*limit, TRAIN, "tiny.yaml", *flags, nodes=1)
    assert cluster.wait(job)[0] == "FAILED"
    assert "giving up" in cluster.output(job)
