"""Writes synthetic run folders: metrics.jsonl and config.yaml as a training run writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

START_TIME = 1_700_000_000.0

CONFIG = {
    "model": "nano",
    "attention": None,
    "train_data": "shards/{00000..00007}.tar",
    "batch_size": 128,
    "epochs": 2,
    "lr": 0.001,
    "seed": 0,
    "name": None,
}


class RunWriter:
    """Writes one run folder line by line; time passes a second a line."""

    def __init__(self, folder: Path, **config: Any) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.time = START_TIME
        settings = {**CONFIG, "name": folder.name, **config}
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        (folder / "metrics.jsonl").touch()

    def raw(self, text: str) -> RunWriter:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(text)
        return self

    def line(self, kind: str, samples: int, **fields: Any) -> RunWriter:
        self.time += 1.0
        return self.raw(json.dumps({"type": kind, "samples": samples, "time": self.time, **fields}) + "\n")

    def start(self, samples: int = 0, resumed: bool = False, **fields: Any) -> RunWriter:
        defaults = {
            "model": "nano-LA",
            "attention": {"kind": "eq7"},
            "num_parameters": 1_500_000,
            "tower_parameters": {"image": 600_000, "text": 899_999},
            "sample_flops": 2e9,
            "device": "cpu",
            "versions": {"clip_la": "0.1.0", "torch": "2.9"},
            "samples_total": 1000,
            "world_size": 1,
            "global_batch_size": 128,
        }
        return self.line("run_start", samples, resumed=resumed, **{**defaults, **fields})

    def train(self, samples: int, loss: float | None, **fields: Any) -> RunWriter:
        defaults = {
            "step": samples // 128,
            "epoch": 0,
            "lr": 1e-3,
            "logit_scale": 14.3,
            "grad_norm": 1.0,
            "samples_per_second": 500.0,
            "data_wait": 0.01,
            "peak_memory_bytes": 2**30,
            "skipped_steps": 0,
            "lost_samples": 0,
        }
        return self.line("train", samples, loss=loss, **{**defaults, **fields})

    def epoch(self, samples: int, epoch: int, loss: float | None, **losses: int) -> RunWriter:
        return self.line("epoch", samples, epoch=epoch, loss=loss, seconds=1.0, losses=losses)

    def eval(self, samples: int, name: str, **metrics: Any) -> RunWriter:
        return self.line("eval", samples, name=name, metrics=metrics)

    def zeroshot(self, samples: int, top1: float | None, name: str = "zeroshot/held_out") -> RunWriter:
        metrics: dict[str, Any] = {"top1": top1, "top5": 0.9, "num_images": 400, "num_classes": 40}
        if top1 is not None:
            metrics |= {"top1_low": top1 - 0.03, "top1_high": top1 + 0.04}
        return self.eval(samples, name, **metrics)

    def end(self, samples: int, reason: str = "finished") -> RunWriter:
        return self.line("run_end", samples, reason=reason, seconds=self.time - START_TIME)


NewRun = Callable[..., RunWriter]
FinishedRun = Callable[..., Path]
