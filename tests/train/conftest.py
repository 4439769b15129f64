"""A data set and a model small enough to train in a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clip_la.config import RunConfig
from clip_la.config_sources import load_run_config
from tiny_run import RECOMMENDED, two_colour_shards, write_model_config

KINDS: dict[str, dict[str, object] | None] = {
    "softmax": None,
    "eq4": {"kind": "eq4"},
    "eq7": {"kind": "eq7"},
    "centred": RECOMMENDED,
}


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return two_colour_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """JSON files of a 32-pixel model in each kind of attention, by kind."""
    folder = tmp_path_factory.mktemp("models")
    return {
        kind: str(write_model_config(folder / f"ViT-tiny-{kind}.json", attention, text_layers=1))
        for kind, attention in KINDS.items()
    }


@pytest.fixture
def make_config(shards: str, tiny_models: dict[str, str], tmp_path: Path) -> Callable[..., RunConfig]:
    """A run of 16 steps over 4 epochs, with anything overridden."""

    def make(kind: str = "centred", **overrides: Any) -> RunConfig:
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
