"""A real Slurm cluster of two virtual nodes, and a small training job to send through it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from local_cluster import REPO_ROOT, Cluster


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


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, a folder with shards, models, and run configs `tiny.yaml` and `tiny-softmax.yaml`."""
    if os.geteuid() != 0 or shutil.which("slurmctld") is None:
        pytest.skip("needs root and an installed Slurm (scripts/test.sh --slurm)")
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "shards").mkdir()
    shards = _train_conftest().write_shards(folder / "shards")
    write_model(folder / "ViT-tiny.json", {"kind": "eq7", "gain": "learned", "scale": "length"})
    write_model(folder / "ViT-tiny-softmax.json", None)
    (folder / "base.yaml").write_text(
        f"train-data: {shards}\nbatch-size: 8\nepochs: 40\nlr: 1e-3\nwarmup: 2\nworkers: 1\nprecision: fp32\n"
        "device: cpu\nlog-every-n-steps: 2\nsave-frequency: 0\nsave-every-samples: 160\n"
    )
    (folder / "tiny.yaml").write_text("base: base.yaml\nmodel: ViT-tiny.json\n")
    (folder / "tiny-softmax.yaml").write_text("base: base.yaml\nmodel: ViT-tiny-softmax.json\n")
    source = REPO_ROOT / "src"
    (folder / "site.sh").write_text(
        f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={source} OMP_NUM_THREADS=1\n"
    )
    state = Path(tempfile.mkdtemp(prefix="clip_la_slurm_"))
    state.chmod(0o755)  # munged wants it so, up to the root
    environment = {
        **os.environ,
        "SLURM_LOCAL_DIR": str(state),
        "SLURM_CONF": str(state / "slurm.conf"),
        "CLIP_LA_SITE": str(folder / "site.sh"),
    }
    made = Cluster(folder, environment)
    made.control("start")
    try:
        yield made
    finally:
        made.control("stop")
        shutil.rmtree(state, ignore_errors=True)
