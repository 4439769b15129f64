"""A run's parts and how they are built: model, data, optimizer, and the state they continue from."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clip_la.attention import explain_choice
from clip_la.bundle import ClipBundle, build, load_weights, resolve_model_config
from clip_la.checkpoint import CheckpointStore
from clip_la.config import RunConfig
from clip_la.data.loader import TrainLoader
from clip_la.distributed import World
from clip_la.host_memory import keep_freed_memory
from clip_la.metrics import MetricsLog, build_sinks
from clip_la.model_size import NotEstimatedError, model_shape, training_flops
from clip_la.openclip import load_softmax_weights, tower_of
from clip_la.train import resume
from clip_la.train.contrast import Contrast
from clip_la.train.diagnostics import Diagnostics
from clip_la.train.evaluators import ScheduledEvaluator, build_evaluators
from clip_la.train.optim import Clock, build_optimizer
from clip_la.train.specs import train_spec

logger = logging.getLogger(__name__)

SIGLIP_START = {"init_logit_scale": math.log(10), "init_logit_bias": -10.0}
"""Where the sigmoid loss starts (arXiv 2303.15343), as in OpenCLIP's trainer."""


@dataclass
class Progress:
    """What a run has done so far, equal on all ranks; saved in checkpoints."""

    samples: int = 0
    step: int = 0
    skipped_steps: int = 0
    epoch_loss: float = 0.0
    epoch_steps: int = 0


@dataclass
class Run:
    """Everything that one rank trains with."""

    config: RunConfig
    world: World
    folder: Path
    bundle: ClipBundle
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    contrast: Contrast
    loader: TrainLoader
    loader_state: dict[str, Any] | None
    clock: Clock
    evaluators: Sequence[ScheduledEvaluator]
    diagnostics: Diagnostics | None
    store: CheckpointStore | None
    metrics: MetricsLog | None
    progress: Progress
    lost: Counter[str]

    @property
    def global_batch(self) -> int:
        """Samples in one step, over ranks and micro-steps."""
        return self.config.batch_size * self.config.accum_freq * self.world.size

    @property
    def is_finished(self) -> bool:
        """Whether all samples have been seen."""
        return self.progress.samples >= self.clock.total_samples

    @property
    def epoch(self) -> int:
        """Virtual epochs completed."""
        return self.progress.samples // self.clock.epoch_samples

    @property
    def is_at_epoch_end(self) -> bool:
        """Whether the last step completed a virtual epoch, or the run."""
        before = self.progress.samples - self.global_batch
        return before >= 0 and (self.is_finished or before // self.clock.epoch_samples < self.epoch)

    def lost_by_cause(self) -> Counter[str]:
        """Samples lost so far over all ranks, by cause. A collective."""
        return sum(self.world.gather(self.lost), Counter())

    def record(self, kind: str, **values: Any) -> None:
        """Write to metrics.jsonl, on the rank that has it."""
        if self.metrics is not None:
            self.metrics.write(kind, self.progress.samples, **values)


def build_run(config: RunConfig, world: World, folder: Path) -> Run:
    """Model, data, optimizer and the state that the run continues from."""
    if world.device.type == "cpu":
        keep_freed_memory()
    store = CheckpointStore(folder / "checkpoints", config.keep_last) if world.is_main else None
    saved = resume.find(folder / "checkpoints", config, world)
    resume.seed_everything(config.seed)
    bundle = _build_model(config, world, fresh=saved is None)
    resume.seed_everything(config.seed + world.rank)
    if saved is not None:
        bundle.model.load_state_dict(saved["state_dict"])
    optimizer = build_optimizer(bundle.model, config)
    scaler = torch.amp.GradScaler(world.device.type) if config.precision == "amp" else None
    loader_state = resume.loader_state(saved, world)
    loader = _build_loader(config, world, bundle, loader_state)
    progress = Progress()
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
        if scaler is not None:
            scaler.load_state_dict(saved["scaler"])
        progress = Progress(**saved["progress"])
    run = Run(
        config=config,
        world=world,
        folder=folder,
        bundle=bundle,
        model=_wrap(bundle.model, config, world),
        optimizer=optimizer,
        scaler=scaler,
        contrast=Contrast(config, world, bundle),
        loader=loader,
        loader_state=loader_state,
        clock=resume.clock(saved, config, world, loader.num_samples),
        evaluators=build_evaluators(config, must_build=saved is None),
        diagnostics=Diagnostics(config, bundle) if config.diagnostics and world.is_main else None,
        store=store,
        metrics=MetricsLog(folder / "metrics.jsonl", build_sinks(config, folder)) if world.is_main else None,
        progress=progress,
        lost=resume.lost_samples(saved, world),
    )
    if not run.is_finished:
        _announce(run, resumed=saved is not None)
    _warn_of_weak_gradient(config, world)
    resume.restore_rng(saved, world)
    return run


def _build_model(config: RunConfig, world: World, *, fresh: bool) -> ClipBundle:
    model_config = resolve_model_config(
        config.model,
        attention=config.attention,
        force_image_size=config.force_image_size,
        force_context_length=config.force_context_length,
        force_patch_dropout=config.force_patch_dropout,
        force_quick_gelu=config.force_quick_gelu,
        force_custom_text=config.force_custom_text,
    )
    if config.siglip:
        model_config |= SIGLIP_START
    preprocess = {
        "mean": config.image_mean,
        "std": config.image_std,
        "interpolation": config.image_interpolation,
        "resize_mode": config.image_resize_mode,
    }
    bundle = build(
        model_config,
        model_name=Path(config.model).stem if config.model.endswith(".json") else config.model,
        precision=config.precision,
        device=world.device,
        preprocess_config={key: value for key, value in preprocess.items() if value is not None},
        aug_cfg=config.aug_cfg,
    )
    if fresh and config.pretrained:
        load_weights(bundle.model, config.pretrained)
    if fresh and config.pretrained_softmax:
        load_softmax_weights(bundle.model, config.pretrained_softmax)
    model: Any = bundle.model
    if config.lock_image:
        model.lock_image_tower(unlocked_groups=config.lock_image_unlocked_groups)
    if config.lock_text:
        model.lock_text_tower(unlocked_layers=config.lock_text_unlocked_layers)
    if config.grad_checkpointing:
        model.set_grad_checkpointing()
    return bundle


def _wrap(model: nn.Module, config: RunConfig, world: World) -> nn.Module:
    wrapped: Any = torch.compile(model) if config.torchcompile else model
    if world.is_distributed:
        device_ids = [world.device] if world.device.type == "cuda" else None
        wrapped = DistributedDataParallel(
            wrapped, device_ids=device_ids, static_graph=config.ddp_static_graph
        )
    return wrapped  # type: ignore[no-any-return]


def _build_loader(
    config: RunConfig, world: World, bundle: ClipBundle, state: dict[str, Any] | None
) -> TrainLoader:
    spec = replace(train_spec(config, world.rank, world.size), pin_memory=world.device.type == "cuda")
    return TrainLoader(spec, bundle.preprocess_train, bundle.tokenizer, state)


def _warn_of_weak_gradient(config: RunConfig, world: World) -> None:
    if world.is_main and world.is_distributed and not config.gather_with_grad and not config.siglip:
        logger.warning(
            "--no-gather-with-grad: the towers' gradient is 1/%d of one process's (logit_scale's is not)",
            world.size,
        )


def _count_tower_parameters(model: nn.Module) -> dict[str, int]:
    towers = Counter[str]()
    for name, parameter in model.named_parameters():
        towers[tower_of(name) or "neither"] += parameter.numel()
    return {tower: towers[tower] for tower in ("image", "text")}


def _sample_flops(run: Run) -> float | None:
    """Of training on one sample, by the model's config; None where it can't be estimated."""
    try:
        shape = model_shape(run.bundle.model_config)
    except NotEstimatedError:
        return None
    return training_flops(shape, run.global_batch, recompute=False)


def _announce(run: Run, *, resumed: bool) -> None:
    spec, model = run.bundle.spec, run.bundle.model
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    tower_parameters = _count_tower_parameters(model)
    logger.info("run folder: %s", run.folder)
    logger.info(
        "model %s: attention %s, %s parameters, %s on %s",
        run.bundle.model_name, spec, f"{num_parameters:,}", run.config.precision, run.world.device,
    )  # fmt: skip
    if spec.kind != "softmax":
        logger.info("attention backend: %s", explain_choice(run.world.device, run.bundle.attention_dtype))
    logger.info(
        "data: %s samples an epoch, %d epochs; global batch %d = %d x %d micro-steps x %d ranks",
        f"{run.clock.epoch_samples:,}", run.config.epochs, run.global_batch,
        run.config.batch_size, run.config.accum_freq, run.world.size,
    )  # fmt: skip
    if resumed:
        logger.info(
            "continuing at %s of %s samples", f"{run.progress.samples:,}", f"{run.clock.total_samples:,}"
        )
    run.record(
        "run_start",
        model=run.bundle.model_name,
        attention=spec.to_config(),
        num_parameters=num_parameters,
        tower_parameters=tower_parameters,
        sample_flops=_sample_flops(run),
        versions=resume.versions(),
        resumed=resumed,
        samples_total=run.clock.total_samples,
        world_size=run.world.size,
        global_batch_size=run.global_batch,
        device=str(run.world.device),
    )
