"""Stand-ins for finished trainings: run folders with the lines that panels read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

SOFTMAX = {"kind": "softmax"}
EQ7 = {"kind": "eq7"}
EQ4 = {"kind": "eq4"}
GAIN = {"kind": "eq7", "gain": "learned", "scale": "length"}


def write_run(
    folder: Path,
    attention: Mapping[str, Any],
    losses: Sequence[float],
    *,
    seed: int = 0,
    top1: float | None = None,
    image_parameters: int = 1_000_000,
    reason: str = "finished",
    seconds_a_point: float = 2.0,
) -> Path:
    """A run of 1,000 samples a held-out loss; with `top1`, evaluated zero-shot after the last."""
    folder.mkdir(parents=True)
    config = {"model": "ViT-x", "seed": seed, "lr": 1e-3, "precision": "fp32", "batch_size": 64,
              "train_data": "a.tar", "val_data": "b.tar", "name": folder.name}  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    total = 1000 * len(losses)
    lines: list[dict[str, Any]] = [
        {"type": "run_start", "samples": 0, "model": "ViT-x", "attention": dict(attention), "resumed": False,
         "num_parameters": 2 * image_parameters, "samples_total": total, "global_batch_size": 64,
         "tower_parameters": {"image": image_parameters, "text": image_parameters}}
    ]  # fmt: skip
    for number, loss in enumerate(losses, start=1):
        metrics = {"loss": loss, "num_negatives": 256}
        lines += [
            {
                "type": "train",
                "samples": 1000 * number,
                "loss": loss,
                "samples_per_second": 300.0,
                "data_wait": 0.0,
            },
            {"type": "eval", "samples": 1000 * number, "name": "validation", "metrics": metrics},
        ]
    if top1 is not None:
        metrics = {"top1": top1, "top1_low": top1 - 0.03, "top1_high": top1 + 0.03, "chance": 0.02}
        lines.append({"type": "eval", "samples": total, "name": "zeroshot/tree", "metrics": metrics})
    lines.append({"type": "run_end", "samples": total, "reason": reason, "seconds": 1.0})
    text = "".join(
        json.dumps({**line, "time": 1.7e9 + seconds_a_point * line["samples"] / 1000}) + "\n"
        for line in lines
    )
    (folder / "metrics.jsonl").write_text(text)
    return folder


def scaling_runs(folder: Path, laws: Mapping[str, tuple[float, float]], sizes: Sequence[int]) -> list[Path]:
    """Runs whose losses lie on a N^-b; kind -> (a, b)."""
    attentions = {"softmax": SOFTMAX, "eq7": EQ7, "gain": GAIN}
    return [
        write_run(folder / f"{kind}-{size}", attentions[kind], [5.0, a * size**-b], image_parameters=size)
        for kind, (a, b) in laws.items()
        for size in sizes
    ]
