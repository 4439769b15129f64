"""A real Slurm cluster of three virtual nodes, and a small training job to send through it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from local_cluster import REPO_ROOT, SCRIPT, Cluster, remove_abandoned, running_cluster


def _train_conftest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_conftest", REPO_ROOT / "tests/train/conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_model(path: Path, attention: dict[str, Any] | None) -> None:
    """A 32-pixel model that steps in a hundredth of a second."""
    config: dict[str, Any] = {
        "embed_dim": 32,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8, "head_width": 32},
        "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 1, "layers": 1},
    }
    path.write_text(json.dumps({**config, **({"attention": attention} if attention else {})}))


def write_folder(folder: Path) -> None:
    """What jobs are sent from: shards, models, configs `tiny.yaml` and `tiny-softmax.yaml`, a site file."""
    (folder / "shards").mkdir()
    shards = _train_conftest().write_shards(folder / "shards")
    write_model(folder / "ViT-tiny.json", {"kind": "eq7", "gain": "learned", "scale": "length"})
    write_model(folder / "ViT-tiny-softmax.json", None)
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
