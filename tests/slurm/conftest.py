"""A real Slurm cluster of three virtual nodes, and a small training job to send through it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_cluster import REPO_ROOT, SCRIPT, Cluster, remove_abandoned, running_cluster

from tiny_run import RECOMMENDED, two_colour_shards, write_model_config


def write_folder(folder: Path) -> None:
    """What jobs are sent from: shards, models, configs `tiny.yaml` and `tiny-softmax.yaml`, a site file."""
    (folder / "shards").mkdir()
    shards = two_colour_shards(folder / "shards")
    write_model_config(folder / "ViT-tiny.json", RECOMMENDED, text_layers=1)
    write_model_config(folder / "ViT-tiny-softmax.json", None, text_layers=1)
    (folder / "base.yaml").write_text(
        f"train-data: {shards}\nbatch-size: 8\nepochs: 20\nlr: 1e-3\nwarmup: 2\nworkers: 1\nprecision: fp32\n"
        "device: cpu\nlog-every-n-steps: 2\nsave-frequency: 0\nsave-every-samples: 160\n"
    )
    (folder / "tiny.yaml").write_text("base: base.yaml\nmodel: ViT-tiny.json\n")
    (folder / "tiny-softmax.yaml").write_text("base: base.yaml\nmodel: ViT-tiny-softmax.json\n")
    (folder / "site.sh").write_text(
        f"export PATH='{Path(sys.executable).parent}':$PATH PYTHONPATH='{REPO_ROOT}/src' OMP_NUM_THREADS=1\n"
    )


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes that live as long as this process, and a folder of `write_folder`."""
    able = subprocess.run([SCRIPT, "able"], capture_output=True, text=True, check=False)
    if able.returncode != 0:
        pytest.skip(able.stderr.strip())
    folder = tmp_path_factory.mktemp("cluster")
    write_folder(folder)
    remove_abandoned()
    with running_cluster() as environment:
        yield Cluster(folder, {**environment, "CLIP_LA_SITE": str(folder / "site.sh")})
