"""slurm/eval.sbatch, its watcher, and slurm/compare.sbatch on a real cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from local_cluster import REPO_ROOT, Cluster, wait_until
from PIL import Image

from clip_la.report.runs import read_run

pytestmark = pytest.mark.slurm
SLURM = REPO_ROOT / "slurm"


@pytest.fixture(scope="module")
def zeroshot(cluster: Cluster) -> list[str | Path]:
    """The flags of a two-class tree."""
    for name, colour in {"red": (220, 30, 30), "green": (30, 200, 40)}.items():
        for index in range(3):
            path = cluster.folder / "tree" / name / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), colour).save(path)
    (cluster.folder / "classes.txt").write_text("red\ngreen\n")
    return ["--zeroshot", "tree", "--classnames", "classes.txt", "--templates", "plain", "--device", "cpu"]


def test_compare_watch_report_and_eval(cluster: Cluster, zeroshot: list[str | Path]) -> None:
    """Two runs as an array with their report; one of them watched meanwhile; then a sharded evaluation."""
    watcher = cluster.submit(
        SLURM / "eval.sbatch", "--watch", "logs/tiny", *zeroshot, "--poll-seconds", "1", nodes=1
    )
    environment = {**cluster.environment, "CLIP_LA_CONFIGS": "tiny.yaml tiny-softmax.yaml"}
    size = ["--nodes=1", "--gpus-per-node=1", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=2000"]
    flags = ["--epochs", "4", "--save-frequency", "2"]
    said = Cluster(cluster.folder, environment).call(
        "bash", SLURM / "compare.sbatch", *size, "--time=20", "--", *flags
    )
    array, report = (line.split()[2].rstrip(":") for line in said.splitlines())
    assert cluster.wait(report) == ("COMPLETED", 0), cluster.output(report)
    for task in (0, 1):
        assert cluster.wait(f"{array}_{task}") == ("COMPLETED", 0), cluster.output(f"{array}_{task}")
    html = (cluster.folder / "logs" / f"compare-{array}" / "report.html").read_text()
    assert "tiny-softmax" in html

    assert cluster.wait(watcher) == ("COMPLETED", 0), cluster.output(watcher)
    watched = read_run(cluster.folder / "logs" / "tiny").evals
    assert [(point.samples, point.name) for point in watched] == [
        (128, "zeroshot/tree"),
        (256, "zeroshot/tree"),
    ]

    job = cluster.submit(SLURM / "eval.sbatch", "logs/tiny", *zeroshot, "--json", "result.json", nodes=2)
    assert cluster.wait(job) == ("COMPLETED", 0), cluster.output(job)
    sharded = json.loads((cluster.folder / "result.json").read_text())
    assert sharded["metrics"]["num_images"] == 6
    assert sharded["metrics"] == watched[-1].metrics


def test_an_evaluation_that_cannot_run_fails(cluster: Cluster, zeroshot: list[str | Path]) -> None:
    job = cluster.submit(SLURM / "eval.sbatch", "logs/no-such-run", *zeroshot, nodes=1)
    assert cluster.wait(job) == ("FAILED", 1)
    wait_until(lambda: "no checkpoint at logs/no-such-run" in cluster.output(job), cluster.output(job))
