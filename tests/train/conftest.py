"""A data set and a model small enough to train in a second."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clip_la.config import RunConfig
from clip_la.config_sources import load_run_config

NUM_SHARDS, SHARD_SIZE = 4, 16
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 220), "white": (240, 240, 240)}


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def write_shards(folder: Path) -> str:
    """Pictures whose two halves have the colours that the caption names."""
    pairs = [(left, right) for left in COLOURS for right in COLOURS]
    for shard in range(NUM_SHARDS):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for index in range(SHARD_SIZE):
                left, right = pairs[(index + shard) % len(pairs)]
                image = Image.new("RGB", (32, 32), COLOURS[left])
                image.paste(COLOURS[right], (16, 0, 32, 32))
                buffer = io.BytesIO()
                image.save(buffer, "PNG")
                add_member(tar, f"{shard:03d}{index:06d}.jpg", buffer.getvalue())
                add_member(tar, f"{shard:03d}{index:06d}.txt", f"{left} and {right}".encode())
    (folder / "sizes.json").write_text(json.dumps({f"{n:05d}.tar": SHARD_SIZE for n in range(NUM_SHARDS)}))
    return str(folder / "{00000..00003}.tar")


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """JSON files of a 32-pixel model in each kind of attention, by kind."""
    folder = tmp_path_factory.mktemp("models")
    kinds: dict[str, dict[str, Any] | None] = {
        "softmax": None,
        "eq4": {"kind": "eq4"},
        "eq7": {"kind": "eq7"},
        "gain": {"kind": "eq7", "gain": "learned", "scale": "length"},
    }
    for kind, attention in kinds.items():
        config: dict[str, Any] = {
            "embed_dim": 32,
            "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8, "head_width": 32},
            "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 1, "layers": 1},
        }
        if attention is not None:
            config["attention"] = attention
        (folder / f"ViT-tiny-{kind}.json").write_text(json.dumps(config))
    return {kind: str(folder / f"ViT-tiny-{kind}.json") for kind in kinds}


@pytest.fixture
def make_config(shards: str, tiny_models: dict[str, str], tmp_path: Path) -> Callable[..., RunConfig]:
    """A run of 16 steps over 4 epochs, with anything overridden."""

    def make(kind: str = "gain", **overrides: Any) -> RunConfig:
        settings: dict[str, Any] = {
            "model": tiny_models[kind],
            "train_data": shards,
            "batch_size": 16,
            "epochs": 4,
            "lr": 1e-3,
            "warmup": 2,
            "workers": 0,
            "precision": "fp32",
            "device": "cpu",
            "log_every_n_steps": 1,
            "logs": str(tmp_path / "logs"),
            "name": "run",
            "save_frequency": 0,
        }
        return load_run_config(None, {**settings, **overrides})

    return make
