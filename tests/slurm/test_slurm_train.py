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
    cluster.control("crash", "node2")
    wait_until(lambda: "down" in cluster.call("sinfo", "-hNn", "node2", "-o", "%T"), "node2 is down")
    cluster.control("boot", "node2")


def test_one_job_through_every_interruption(cluster: Cluster, straight: Path) -> None:
    # A second a shard, so that interruptions fall into training however fast the machine is.
    shards = "pipe:sleep 1; cat " + str(cluster.folder / "shards" / "{00000..00003}.tar")
    flags = ["--train-data", shards, "--allow-pipe", "--train-num-samples", "64"]
    job = cluster.submit("--signal=B:USR1@120", TRAIN, "tiny.yaml", "--name", "hunted", *flags)
    for start, interrupt in enumerate((warn_of_time_limit, requeue, preempt, crash_a_node)):
        wait_for_training(cluster, job, start)
        interrupt(cluster, job)
    assert cluster.wait(job) == ("COMPLETED", 0), cluster.output(job)

    run, output = cluster.folder / "logs" / "hunted", cluster.output(job)
    assert output.count("stopped by SIGUSR1 and saved") == 1, output
    assert output.count("stopped by SIGTERM and saved") >= 2, output
    samples = [start["samples"] for start in starts(run)]
    # Whoever is warned saves; a node that dies can cost what came after the last regular save. To a node that
    # is back Slurm repeats the signal that it couldn't deliver, which may stop the job more than once.
    assert len(samples) >= 5, output
    assert samples[0] < samples[1] < samples[2] < samples[3] <= samples[4], output
    assert samples == sorted(samples), output
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


def test_a_container_holds_every_process(cluster: Cluster) -> None:
    """A stand-in for Apptainer notes what it is told and runs the command that follows the image."""
    stub = cluster.folder / "bin" / "apptainer"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/bash\necho "$@" >>{cluster.folder}/contained\nexec "${{@:8}}"\n')
    stub.chmod(0o755)
    site = cluster.folder / "container_site.sh"
    site.write_text(
        (cluster.folder / "site.sh").read_text()
        + f"PATH={stub.parent}:$PATH\n"
        + "CONTAINER=apptainer CONTAINER_IMAGE=clip.sif CONTAINER_MOUNTS=/tmp:/tmp\n"
    )
    inside = Cluster(cluster.folder, {**cluster.environment, "CLIP_LA_SITE": str(site)})
    job = inside.submit(TRAIN, "tiny.yaml", "--name", "contained", "--epochs", "1", nodes=1)
    assert cluster.wait(job) == ("COMPLETED", 0), cluster.output(job)
    calls = (cluster.folder / "contained").read_text().splitlines()
    here = f"exec --nv --bind {cluster.folder},/tmp:/tmp --pwd {cluster.folder} clip.sif python -m clip_la."
    assert [call.startswith(here) for call in calls] == [True] * 3
    assert [call.removeprefix(here).split()[0] for call in calls] == [
        "cluster.preflight",
        "cli",
        "cluster.restarts",
    ]


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
    """Each start crashes where the preflight can't see it."""
    environment = {**cluster.environment, "CLIP_LA_SITE": str(cluster.folder / "crashing_site.sh")}
    (cluster.folder / "crashing_site.sh").write_text(
        (cluster.folder / "site.sh").read_text() + "clip_la=(bash -c 'sleep 1; kill -KILL $$')\n"
    )
    job = Cluster(cluster.folder, environment).submit(TRAIN, "tiny.yaml", "--name", "crashing", nodes=1)
    assert cluster.wait(job) == ("FAILED", 1), cluster.output(job)
    assert cluster.show(job, "Restarts") == "3"
    assert f"giving up: 4 starts of job {job} have left no checkpoint" in cluster.output(job)
