"""What a run continues from: the checkpoint, the clock, the data position, the random numbers."""

from __future__ import annotations

import logging
import platform
import random
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clip_la import checkpoint
from clip_la.config import RunConfig, flag_name
from clip_la.distributed import World
from clip_la.train.optim import Clock

logger = logging.getLogger(__name__)

Saved = dict[str, Any]
# Settings that may change between starts without changing what is trained.
_HARMLESS = {
    "logs", "name", "resume", "device", "log_every_n_steps", "log_level", "report_to", "wandb_notes",
    "save_frequency", "save_every_samples", "save_every_minutes", "keep_last", "dist_backend",
    "dist_timeout_minutes", "pretrained", "pretrained_softmax", "zeroshot", "classnames", "templates",
    "zeroshot_frequency", "val_data", "val_num_samples", "val_frequency", "evaluators",
    "diagnostics", "diagnostics_frequency",
}  # fmt: skip


def find(folder: Path, config: RunConfig, world: World) -> Saved | None:
    """The state to continue from: the run's own newest readable checkpoint, else `--resume`, else None.

    Every rank reads the file that rank 0 chose.
    """
    path: str | None = None
    if world.is_main:
        found = checkpoint.newest_readable(folder)
        path = str(found[0]) if found else config.resume
    path = world.broadcast(path)
    if path is None:
        return None
    saved = checkpoint.read(path)
    if world.is_main:
        logger.info("continuing from %s", path)
        _warn_of_changes(saved["config"], config)
    return saved


def _warn_of_changes(before: Mapping[str, Any], config: RunConfig) -> None:
    for name, value in plain(vars(config)).items():
        if name in before and before[name] != value and name not in _HARMLESS:
            logger.warning(
                "%s was %r when this run was saved and is %r now", flag_name(name), before[name], value
            )


def clock(saved: Saved | None, config: RunConfig, world: World, epoch_samples: int) -> Clock:
    """The run's horizon. Warm-up keeps the length it had in samples unless `--warmup` itself changed."""
    warmup_samples = config.warmup * config.batch_size * config.accum_freq * world.size
    if saved is not None and saved["config"]["warmup"] == config.warmup:
        warmup_samples = saved["clock"]["warmup_samples"]
    now = Clock(config.epochs * epoch_samples, warmup_samples, epoch_samples)
    if saved is not None and saved["clock"]["total_samples"] != now.total_samples and world.is_main:
        logger.warning(
            "the run was planned for %s samples, now for %s; the learning rate follows the new plan",
            f"{saved['clock']['total_samples']:,}",
            f"{now.total_samples:,}",
        )
    return now


def loader_state(saved: Saved | None, world: World) -> dict[str, Any] | None:
    """This rank's position in the data; a new rank gets rank 0's, which tells the epoch to go on in."""
    if saved is None:
        return None
    ranks = saved["ranks"]
    state: dict[str, Any] | None = ranks[world.rank if world.rank < len(ranks) else 0]["loader"]
    return state


def lost_samples(saved: Saved | None, world: World) -> Counter[str]:
    """This rank's counts of lost samples; with another number of ranks, rank 0 takes over all."""
    if saved is None:
        return Counter()
    lost = [Counter(rank["lost"]) for rank in saved["ranks"]]
    if len(lost) == world.size:
        return lost[world.rank]
    return sum(lost, Counter()) if world.is_main else Counter()


def seed_everything(seed: int) -> None:
    """Seed torch, numpy and random, as OpenCLIP's trainer does."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (OpenCLIP's transforms draw from it)
    random.seed(seed)


def rng_state(world: World) -> dict[str, Any]:
    """The state of every random number generator of this rank, as weights_only loading accepts it."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(world.device) if world.device.type == "cuda" else None,
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "python": random.getstate(),
    }


def restore_rng(saved: Saved | None, world: World) -> None:
    """Set this rank's generators to where they were; a rank that is new keeps its seed."""
    if saved is None or world.rank >= len(saved["ranks"]):
        return
    state = saved["ranks"][world.rank]["rng"]
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and world.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], world.device)
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    random.setstate(state["python"])


def versions() -> dict[str, str]:
    """What this process runs on."""
    packages = ("clip_la", "open_clip_torch", "torch", "timm", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """A config as plain lists and dicts, which weights_only loading and comparisons agree on."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
