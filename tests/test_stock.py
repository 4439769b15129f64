"""OpenCLIP's own trainer with the plugin registered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import open_clip
import pytest
import torch
from PIL import Image

from clip_la.openclip import spec_of_weights


def run_stock(*flags: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clip_la.stock", *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False, cwd=cwd,
    )  # fmt: skip


@pytest.mark.slow
def test_stock_trainer_trains_a_linear_model(tmp_path: Path) -> None:
    rows = ["filepath\ttitle"]
    for index in range(8):
        Image.new("RGB", (64, 64), (index * 30, 0, 0)).save(tmp_path / f"{index}.png")
        rows.append(f"{tmp_path}/{index}.png\tshade {index}")
    (tmp_path / "train.csv").write_text("\n".join(rows))
    done = run_stock(
        *(
            "--model",
            "ViT-nano-8-LA",
            "--train-data",
            "train.csv",
            "--dataset-type",
            "csv",
            "--batch-size",
            "4",
        ),
        *("--epochs", "1", "--warmup", "1", "--workers", "0", "--device", "cpu", "--precision", "fp32"),
        *("--logs", "logs", "--name", "run"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    path = tmp_path / "logs" / "run" / "checkpoints" / "epoch_1.pt"
    weights = torch.load(path, weights_only=True)["state_dict"]
    assert str(spec_of_weights(weights)) == "eq7"
    open_clip.create_model("ViT-nano-8-LA", pretrained=str(path))


def test_shards_it_cannot_read_are_refused_at_once(tmp_path: Path) -> None:
    done = run_stock("--train-data", "x.tar", "--dataset-type", "webdataset", cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install 'webdataset<=0.2.86'" in done.stderr
