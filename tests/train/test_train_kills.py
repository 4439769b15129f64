"""A run killed at any moment and run again ends as if nothing had happened."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from clip_la import checkpoint
from clip_la.config import RunConfig
from clip_la.train.loop import EXIT_STOPPED, train

pytestmark = pytest.mark.slow


def start(config: RunConfig) -> BaseProcess:
    # Forked, so that a start costs no imports and the kill comes early in the run.
    process = multiprocessing.get_context("fork").Process(target=_train, args=(config,))
    process.start()
    return process


def _train(config: RunConfig) -> None:
    torch.set_num_threads(1)
    os._exit(train(config))


def final_weights(config: RunConfig) -> dict[str, Any]:
    newest = checkpoint.list_checkpoints(Path(config.logs) / str(config.name) / "checkpoints")[0]
    content = checkpoint.read(newest)
    return {**content["state_dict"], "progress": content["progress"]}


@pytest.mark.parametrize(
    ("seed", "overrides"),
    [
        (0, {"workers": 0}),
        (1, {"workers": 2, "batch_size": 8, "accum_freq": 2}),
        (2, {"workers": 1, "precision": "amp_bf16", "dataset_resampled": True}),
    ],
)
def test_killed_at_random_moments(
    seed: int, overrides: dict[str, Any], make_config: Callable[..., RunConfig]
) -> None:
    # Saving at every step makes many of the kills fall into a save.
    common = {"epochs": 20, "save_every_samples": 16, "keep_last": 2, **overrides}
    straight, killed = make_config(**common, name="straight"), make_config(**common, name="killed")
    process = start(straight)
    began = time.monotonic()
    process.join(300)
    assert process.exitcode == 0
    duration = time.monotonic() - began
    rng = random.Random(seed)
    exits: list[int | None] = []
    for _ in range(40):
        process = start(killed)
        process.join(rng.uniform(0.2, 0.6) * duration)
        if process.exitcode is None:
            os.kill(
                process.pid or 0, rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
            )
            process.join(60)
        exits.append(process.exitcode)
        if exits[-1] == 0:
            break
    assert exits[-1] == 0, exits
    assert set(exits[:-1]) <= {-signal.SIGKILL, EXIT_STOPPED}, exits
    assert len(exits) > 2, "no kill came in time"
    ours, theirs = final_weights(killed), final_weights(straight)
    assert ours.pop("progress") == theirs.pop("progress")
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
