"""Settings of `clip-la train` that all trainings of the CPU scale share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clip_la.reproduce.kinds import IMAGE_SIZE

BATCH_SIZE = 64


def training_flags(num_samples: int, num_points: int) -> Mapping[str, Any]:
    """A nano model's recipe, as in configs/demo, for so many samples.

    Args:
        num_samples: seen in all.
        num_points: virtual epochs that these are divided into; each ends with a held-out loss.
    """
    steps_an_epoch = num_samples // num_points // BATCH_SIZE
    return {
        "force_image_size": (IMAGE_SIZE,),
        "train_num_samples": steps_an_epoch * BATCH_SIZE,
        "epochs": num_points,
        "batch_size": BATCH_SIZE,
        "precision": "amp_bf16",
        "device": "cpu",
        "lr": 1e-3,
        "wd": 0.1,
        "warmup": max(steps_an_epoch * num_points // 10, 1),
        "grad_clip_norm": 1.0,
        "workers": 0,
        "val_frequency": 1,
        "zeroshot_frequency": 0,
        "save_frequency": 0,
        "save_every_minutes": 3.0,
        "keep_last": 1,
        "log_every_n_steps": 25,
    }
