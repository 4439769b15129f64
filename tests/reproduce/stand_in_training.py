"""Run in place of `clip-la train --config FILE`: writes what a training writes, at once.

Losses fall with samples and with the model's width; linear attention is a little behind.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import clip_la
from clip_la.config_sources import load_run_config, write_yaml

LINEAR_FACTOR = 1.2
MODELS = Path(clip_la.__file__).parent / "model_configs"


def main(settings: Path) -> None:
    config = load_run_config(settings, {})
    folder = Path(config.logs) / str(config.name)
    (folder / "checkpoints").mkdir(parents=True)
    write_yaml(config, folder / "config.yaml")
    is_file = config.model.endswith(".json")
    model = json.loads((Path(config.model) if is_file else MODELS / f"{config.model}.json").read_text())
    width, attention = model["vision_cfg"]["width"], model.get("attention") or {"kind": "softmax"}
    factor = (1.0 if attention["kind"] == "softmax" else LINEAR_FACTOR) * (1 + 0.001 * config.seed)
    total = config.epochs * (config.train_num_samples or 0)
    lines = [{"type": "run_start", "samples": 0, "model": config.model, "attention": attention,
              "resumed": False, "num_parameters": 99, "samples_total": total,
              "tower_parameters": {"image": width**2, "text": width**2},
              "global_batch_size": config.batch_size}]  # fmt: skip
    for epoch in range(1, config.epochs + 1):
        samples = epoch * (config.train_num_samples or 0)
        loss = factor * (width / 32) ** -0.2 * (1 + config.epochs - epoch)
        lines += [
            {"type": "train", "samples": samples, "loss": loss, "samples_per_second": 9.0, "data_wait": 0.0},
            {"type": "eval", "samples": samples, "name": "validation",
             "metrics": {"loss": loss, "num_negatives": 256}},
        ]  # fmt: skip
    if config.zeroshot is not None:
        metrics = {"top1": 0.5, "top1_low": 0.4, "top1_high": 0.6, "chance": 0.1}
        lines.append({"type": "eval", "samples": total, "name": "zeroshot/tree", "metrics": metrics})
    lines.append({"type": "run_end", "samples": total, "reason": "finished", "seconds": 1.0})
    text = "".join(json.dumps({**line, "time": time.time()}) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
