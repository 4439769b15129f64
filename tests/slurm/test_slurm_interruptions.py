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


def wait_for_training(cluster: Cluster, job: str, start: int) -> None:
    cluster.wait_for_output(job, f"job {job} start {start}:")
    seen = cluster.output(job).count(" samples (")
    cluster.wait_for_output(job, " samples (", seen + 2)


def warn_of_time_limit(cluster: Cluster, job: str) -> None:
    """Set the limit so that the warning 120 seconds before it is due at the next of Slurm's half minutes."""
    hours, minutes, _ = map(int, cluster.show(job, "RunTime").split(":"))
    cluster.call("scontrol", "update", f"JobId={job}", f"TimeLimit={60 * hours + minutes + 2}")
    cluster.wait_for_output(job, "asking the tasks to save and stop")
    wait_until(lambda: cluster.show(job, "Restarts") == "1", "requeued by itself")
    cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=60")


def requeue(cluster: Cluster, job: str) -> None:
    cluster.call("scontrol", "requeue", job)


def preempt(cluster: Cluster, job: str) -> None:
    cluster.submit("--partition=urgent", "--gpus-per-node=8", "--output=/dev/null", "--wrap", "true")


def crash_a_node(cluster: Cluster, job: str) -> None:
    """The job goes on with the third node; this one comes back when Slurm knows that it was away."""
    node = cluster.call("scontrol", "show", "hostnames", cluster.show(job, "NodeList")).split()[1]
    cluster.control("crash", node)
    wait_until(lambda: "down" in cluster.call("sinfo", "-hNn", node, "-o", "%T"), f"{node} is down")


def test_one_job_through_every_interruption(cluster: Cluster, straight: Path) -> None:
    # Some seconds a shard, so that interruptions fall into training however fast the machine is.
    pace = cluster.folder / "pace"
    pace.write_text("2")
    shards = f"pipe:sleep $(cat {pace}); cat " + str(cluster.folder / "shards" / "{00000..00003}.tar")
    flags = ["--train-data", shards, "--allow-pipe", "--train-num-samples", "64"]
    job = cluster.submit("--signal=B:USR1@120", TRAIN, "tiny.yaml", "--name", "hunted", *flags)
    for start, interrupt in enumerate((warn_of_time_limit, requeue, preempt, crash_a_node)):
        wait_for_training(cluster, job, start)
        interrupt(cluster, job)
    pace.write_text("0")
    assert cluster.wait(job) == ("COMPLETED", 0), cluster.output(job)

    run, output = cluster.folder / "logs" / "hunted", cluster.output(job)
    assert output.count("stopped by SIGUSR1 and saved") == 1, output
    assert output.count("stopped by SIGTERM and saved") >= 2, output
    samples = [start["samples"] for start in starts(run)]
    # Whoever is warned saves; a node that dies can cost what came after the last regular save.
    assert len(samples) == 5, output
    assert samples[0] < samples[1] < samples[2] < samples[3] <= samples[4], output
    ours, theirs = final_weights(run), final_weights(straight)
    assert ours.pop("progress") == theirs.pop("progress")
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
