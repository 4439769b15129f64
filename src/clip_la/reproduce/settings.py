"""Settings of `clip-la train` that all trainings of the CPU scale share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clip_la.reproduce.kinds import IMAGE_SIZE

BATCH_SIZE = 64
LEARNING_RATE = 1e-3
_WIDEST_AT_FULL_RATE = 64


def training_flags(num_samples: int, num_points: int) -> Mapping[str, Any]:
    """A nano model's recipe, as in configs/demo, for so many samples.

    Args:
        num_samples: seen in all.
        num_points: held-out losses along the training. It is one virtual epoch, so that every pair is seen
            equally often: each virtual epoch starts anew in another order.
    """
    steps_a_point = num_samples // num_points // BATCH_SIZE
    return {
        "force_image_size": (IMAGE_SIZE,),
        "train_num_samples": steps_a_point * BATCH_SIZE * num_points,
        "epochs": 1,
        "batch_size": BATCH_SIZE,
        "precision": "amp_bf16",
        "device": "cpu",
        "lr": LEARNING_RATE,
        "wd": 0.1,
        "warmup": max(steps_a_point * num_points // 5, 1),
        "grad_clip_norm": 1.0,
        "workers": 0,
        "val_every_samples": steps_a_point * BATCH_SIZE,
        "zeroshot_frequency": 0,
        "save_frequency": 0,
        "save_every_minutes": 3.0,
        "keep_last": 1,
        "log_every_n_steps": 25,
    }


def learning_rate(width: int) -> float:
    """Of a model of the fit: wider towers want smaller steps, in inverse proportion beyond a width of 64.

    At one rate for all, Eq. 7, whose output grows with the number of tokens, learns less the wider it is.
    """
    return LEARNING_RATE * min(1.0, _WIDEST_AT_FULL_RATE / width)
