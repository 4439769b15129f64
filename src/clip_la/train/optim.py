"""Optimizer and learning rate, as OpenCLIP's, on a clock of samples seen."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from clip_la.config import RunConfig


@dataclass(frozen=True)
class Clock:
    """A run's horizon in samples, global over ranks: it survives other batch and world sizes.

    Attributes:
        total_samples: where the run ends.
        warmup_samples: where the warm-up ends.
        epoch_samples: samples in one (virtual) epoch.
    """

    total_samples: int
    warmup_samples: int
    epoch_samples: int


def lr_at(samples: int, config: RunConfig, clock: Clock, batch: int) -> float:
    """The learning rate of the step that begins after `samples` samples and takes `batch` of them.

    Equal to open_clip_train.scheduler's at every step when the batch never changes.
    """
    if config.skip_scheduler:
        return config.lr
    if samples < clock.warmup_samples:
        return config.lr * (samples + batch) / clock.warmup_samples
    if config.lr_scheduler == "const":
        return config.lr
    if config.lr_scheduler == "cosine":
        done = (samples - clock.warmup_samples) / max(1, clock.total_samples - clock.warmup_samples)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done))) * config.lr
    cooldown = (config.epochs_cooldown or 0) * clock.epoch_samples
    start = clock.total_samples - cooldown
    if samples < start:
        return config.lr
    decay = float(max(0.0, 1 - (samples - start) / cooldown) ** config.lr_cooldown_power)
    return decay * (config.lr - config.lr_cooldown_end) + config.lr_cooldown_end


def build_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """AdamW (or a timm optimizer) with OpenCLIP's rule: no weight decay on vectors, norms, biases, scales."""
    betas = (config.beta1, config.beta2)
    if config.opt.startswith("timm/"):
        from timm.optim import create_optimizer_v2

        momentum = {} if config.momentum is None else {"momentum": config.momentum}
        optimizer: torch.optim.Optimizer = create_optimizer_v2(
            model,
            config.opt.removeprefix("timm/"),
            lr=config.lr,
            weight_decay=config.wd,
            eps=config.eps,
            betas=betas,
            **momentum,
        )
        return optimizer
    if config.opt.lower() != "adamw":
        raise ValueError(f"--opt is {config.opt!r}; expected adamw or timm/NAME")
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups = [
        {"params": [p for n, p in trained if _without_decay(n, p)], "weight_decay": 0.0},
        {"params": [p for n, p in trained if not _without_decay(n, p)], "weight_decay": config.wd},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=_may_fuse(config))


def _may_fuse(config: RunConfig) -> bool:
    """Whether AdamW goes over the parameters once in place of ten times.

    Not in fp32, whose steps equal OpenCLIP's to the bit, nor in amp, whose scaler skips steps of the plain
    form.
    """
    return config.precision in ("amp_bf16", "amp_bfloat16", "bf16")


def _without_decay(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim < 2 or any(part in name for part in ("bn", "ln", "bias", "logit_scale"))
