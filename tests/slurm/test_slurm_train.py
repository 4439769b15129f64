"""Jobs that slurm/train.sbatch must not go on with, and those that it must keep apart."""

from __future__ import annotations

import pytest
from local_cluster import REPO_ROOT, Cluster

pytestmark = pytest.mark.slurm
TRAIN = REPO_ROOT / "slurm" / "train.sbatch"


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
    calls = (cluster.folder / "contained").read_text()
    here = f"exec --nv --bind {cluster.folder},/tmp:/tmp --pwd {cluster.folder} clip.sif python"
    assert [
        calls.count(f"{here} {what}")
        for what in ("-m clip_la.cluster.preflight", "-m clip_la.cli", "-c import")
    ] == [1] * 3
    assert calls.count(here) == 3


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
