"""The training spine: train -> build_run -> fit -> step. Read it top to bottom.

The clock is global samples seen. Start order: the run's own newest readable checkpoint -> `--resume`
-> `--pretrained` / `--pretrained-softmax` -> scratch; so the same command, run again, continues.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from clip_la import checkpoint
from clip_la.checkpoint import CheckpointError
from clip_la.config import RunConfig
from clip_la.data.loader import Batch
from clip_la.distributed import init_world
from clip_la.evaluate import Evaluator
from clip_la.exit_codes import EXIT_FINISHED, EXIT_NON_FINITE, EXIT_STOPPED
from clip_la.metrics import recorded_evaluations
from clip_la.peers import shared_fate
from clip_la.train import resume
from clip_la.train.contrast import Micro
from clip_la.train.diagnostics import tower_grad_norms
from clip_la.train.folder import log_to_file, run_folder
from clip_la.train.meter import Meter, StepResult, peak_memory_bytes
from clip_la.train.optim import lr_at
from clip_la.train.run import Run, build_run
from clip_la.train.signals import StopRequest

logger = logging.getLogger(__name__)

FINISHED, NON_FINITE, SIGNAL_ELSEWHERE = "finished", "non_finite", "signal on another rank"
MAX_LOGIT_SCALE = math.log(100)
MUCH_DATA_WAIT = 0.25
MAX_METRICS_SHOWN = 4


def train(config: RunConfig) -> int:
    """Train one rank's part of a run to its end, or to a signal.

    Returns:
        The exit code: 0 finished, 3 stopped on non-finite steps, 75 stopped by a signal and saved.

    Raises:
        ConfigError: the config can't be used.
        CheckpointError: the last checkpoint couldn't be written.
        PeerError: another rank failed, or is gone.
    """
    world = init_world(config.device, config.dist_backend, config.dist_timeout_minutes)
    with StopRequest() as stop, ExitStack() as resources, shared_fate(world):
        if world.is_main:
            folder = resources.enter_context(run_folder(config))
            resources.enter_context(log_to_file(folder))
        else:
            folder = Path(config.logs) / str(config.name)
            logging.getLogger("clip_la").setLevel(logging.WARNING)  # rank 0 tells what all do
        return fit(build_run(config, world, folder), stop)


def fit(run: Run, stop: StopRequest) -> int:
    """Steps until the samples are seen, a stop is requested, or the numbers stop being finite."""
    left_out = _evaluators_left_out(run)
    if run.is_finished and not left_out:
        logger.info("finished already: %s", run.folder)
        return EXIT_FINISHED
    started = time.time()
    try:
        reason = _make_up(run, left_out, stop) or _fit(run, stop)
    finally:
        if run.store is not None:
            run.store.wait()
    run.record("run_end", reason=reason, seconds=time.time() - started)
    if reason == FINISHED:
        logger.info("finished: %s", run.folder)
        return EXIT_FINISHED
    if reason == NON_FINITE:
        logger.error("stopped: %d steps in a row were not finite", run.config.max_bad_steps)
        return EXIT_NON_FINITE
    logger.info("stopped by %s and saved; run the same command again to continue", reason)
    return EXIT_STOPPED


def _make_up(run: Run, evaluators: Sequence[Evaluator], stop: StopRequest) -> str | None:
    """Evaluate what an earlier process left out; why the run ends with that, or None where it goes on."""
    if not _evaluate_all(run, evaluators, stop):
        return stop.signal_name or SIGNAL_ELSEWHERE
    return FINISHED if run.is_finished else None


def _fit(run: Run, stop: StopRequest) -> str:
    """Why it ended: FINISHED, NON_FINITE, or a signal's name."""
    run.model.train()
    _diagnose(run)
    meter = Meter()
    last_save = (run.progress.samples, time.time())
    bad_in_a_row = 0
    # Closing the batches ends the reading processes, also when a step raises.
    with _progress_bar(run) as bar, closing(iter(run.loader)) as batches:
        for micro_batches in _grouped(batches, run.config.accum_freq):
            meter.data_ready()
            result = step(run, micro_batches, stop)
            bad_in_a_row = 0 if result.finite else bad_in_a_row + 1
            meter.add(result, run.global_batch)
            bar.update(run.global_batch)
            if run.progress.step % run.config.log_every_n_steps == 0 or run.is_finished:
                _log_step(run, meter)
            if bad_in_a_row >= run.config.max_bad_steps:
                return NON_FINITE
            due = _due_evaluators(run)
            saved = run.is_at_epoch_end and _end_epoch(run, has_evaluation=bool(due))
            if not saved and (result.stop or due or _save_is_due(run, *last_save)):
                save(run)
                saved = True
            if saved:
                last_save = (run.progress.samples, time.time())
            _diagnose(run)
            all_evaluated = _evaluate_all(run, due, stop)
            if run.is_finished and all_evaluated:
                return FINISHED
            if result.stop or not all_evaluated:
                return stop.signal_name or SIGNAL_ELSEWHERE
            meter.step_done()
    raise RuntimeError("the loader ended; it never should")


def _grouped(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    while True:
        yield [next(batches) for _ in range(size)]


def _save_is_due(run: Run, samples: int, saved_at: float) -> bool:
    every = run.config.save_every_samples
    if every is not None and run.progress.samples // every > samples // every:
        return True
    minutes = run.config.save_every_minutes
    due = minutes is not None and time.time() - saved_at >= 60 * minutes
    # Clocks differ between ranks, and saving is a collective: rank 0's clock decides.
    return bool(run.world.broadcast(due)) if minutes is not None else due


def _end_epoch(run: Run, *, has_evaluation: bool) -> bool:
    """Record the epoch and save where the config or an evaluation asks for it; whether it has saved."""
    progress, config = run.progress, run.config
    mean_loss = progress.epoch_loss / max(1, progress.epoch_steps)
    lost = run.lost_by_cause()
    run.record("epoch", epoch=run.epoch, loss=mean_loss, losses=dict(lost))
    logger.info("epoch %d of %d: mean loss %.4f", run.epoch, config.epochs, mean_loss)
    if lost:
        logger.info("lost so far: %s", ", ".join(f"{count} {cause}" for cause, count in lost.items()))
    progress.epoch_loss, progress.epoch_steps = 0.0, 0
    keep = run.is_finished or bool(config.save_frequency and run.epoch % config.save_frequency == 0)
    if keep or has_evaluation:
        save(run, epoch=run.epoch if keep else None)
    return keep or has_evaluation


def _diagnose(run: Run) -> None:
    """Measure the attention layers where that is due, on the main rank; a failure is reported, no more."""
    every = run.config.diagnostics_frequency
    is_due = run.progress.samples == 0 or (
        run.is_at_epoch_end and (run.is_finished or (every > 0 and run.epoch % every == 0))
    )
    if run.diagnostics is None or not is_due:
        return
    try:
        run.record("diagnostics", layers=run.diagnostics.measure())
    except Exception:
        logger.exception("the diagnostics failed; training goes on")


def _due_evaluators(run: Run) -> list[Evaluator]:
    """What is to be evaluated at the run's present place."""
    after = run.progress.samples
    before = after - run.global_batch
    if before < 0:
        return []
    return [
        scheduled.evaluator
        for scheduled in run.evaluators
        if run.is_finished or scheduled.is_due(before, after, run.clock.epoch_samples)
    ]


def _evaluators_left_out(run: Run) -> list[Evaluator]:
    """Those due at the place that the run continues from, but for what an earlier process has recorded."""
    due = _due_evaluators(run)
    done = (
        recorded_evaluations(run.folder / "metrics.jsonl", run.progress.samples) if run.world.is_main else []
    )
    done = run.world.broadcast(done)
    return [evaluator for evaluator in due if evaluator.name not in done]


def _evaluate_all(run: Run, evaluators: Sequence[Evaluator], stop: StopRequest) -> bool:
    """Evaluate, but for what a stop leaves to the next start; whether all were evaluated."""
    if evaluators:
        _wait_for_save(run)
    for evaluator in evaluators:
        if any(run.world.sum(float(stop.requested))):
            return False
        evaluate(run, evaluator)
    return True


def _wait_for_save(run: Run) -> None:
    """Until the checkpoint is on disk, so that nothing that an evaluation does can cost it."""
    if run.store is None:
        return
    try:
        run.store.wait()
    except CheckpointError as error:
        logger.error("%s; training goes on and tries again at the next save", error)


def evaluate(run: Run, evaluator: Evaluator) -> None:
    """Run one evaluator on the weights as they are; a failure is reported and training goes on."""
    rng = torch.get_rng_state()
    try:
        metrics = evaluator.run(run.bundle)
    except Exception:
        logger.exception("evaluation %s failed; training goes on", evaluator.name)
        run.record("eval_failed", name=evaluator.name)
    else:
        run.record("eval", name=evaluator.name, metrics=metrics)
        shown = [f"{key} {value:.4g}" for key, value in metrics.items() if isinstance(value, float)]
        logger.info("%s: %s", evaluator.name, ", ".join(shown[:MAX_METRICS_SHOWN]))
    finally:
        torch.set_rng_state(rng)
        run.model.train()


def save(run: Run, *, epoch: int | None = None) -> None:
    """Save a checkpoint in the background. A collective: every rank hands in its RNG and data position."""
    rank = {"rng": resume.rng_state(run.world), "loader": run.loader_state, "lost": dict(run.lost)}
    ranks = run.world.gather(rank)
    if run.store is None:
        return
    content = {
        "format": checkpoint.FORMAT,
        "name": run.config.name,
        "epoch": run.epoch,
        "state_dict": run.bundle.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict() if run.scaler is not None else None,
        "progress": dict(vars(run.progress)),
        "clock": vars(run.clock),
        "config": resume.plain(vars(run.config)),
        "model_name": run.bundle.model_name,
        "model_config": run.bundle.model_config,
        "preprocess_config": run.bundle.preprocess_config,
        "precision": run.config.precision,
        "ranks": ranks,
        "versions": resume.versions(),
    }
    try:
        run.store.save(content, samples=run.progress.samples, epoch=epoch)
    except CheckpointError as error:
        logger.error("%s; training goes on and tries again at the next save", error)


def step(run: Run, batches: Sequence[Batch], stop: StopRequest) -> StepResult:
    """One optimizer step on the samples of all micro-batches of all ranks."""
    lr = lr_at(run.progress.samples, run.config, run.clock, run.global_batch)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.zero_grad()
    micros = [_to_device(run, batch) for batch in batches]
    loss = run.contrast.backward(run.model, micros, run.scaler)
    if run.scaler is not None:
        run.scaler.unscale_(run.optimizer)
    tower_norms = {} if run.diagnostics is None else tower_grad_norms(run.bundle.model)
    grad_norm = _clip(run)
    mean_loss, stops = run.world.sum(float(loss), float(stop.requested))
    mean_loss /= run.world.size
    finite = math.isfinite(mean_loss) and math.isfinite(grad_norm)
    _update(run, finite)
    _advance(run, batches, mean_loss if finite else None)
    logit_scale = run.bundle.model.get_parameter("logit_scale").exp().mean().item()
    return StepResult(mean_loss, grad_norm, lr, logit_scale, finite, stops > 0, tower_norms)


def _to_device(run: Run, batch: Batch) -> Micro:
    images = batch.images.to(run.world.device, run.bundle.input_dtype, non_blocking=True)
    return Micro(images, batch.texts.to(run.world.device, non_blocking=True))


def _clip(run: Run) -> float:
    """The gradient's global norm before clipping, equal on all ranks: DDP has averaged."""
    parameters = [p for p in run.bundle.model.parameters() if p.grad is not None]
    norm: Tensor = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if run.config.grad_clip_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, run.config.grad_clip_norm, norm)
    return norm.item()


def _update(run: Run, finite: bool) -> None:
    if run.scaler is not None:
        run.scaler.step(run.optimizer)  # skips by itself what isn't finite
        run.scaler.update()
    elif finite:
        run.optimizer.step()
    with torch.no_grad():
        run.bundle.model.get_parameter("logit_scale").clamp_(0, MAX_LOGIT_SCALE)


def _advance(run: Run, batches: Sequence[Batch], loss: float | None) -> None:
    progress = run.progress
    progress.samples += run.global_batch
    progress.step += 1
    if loss is None:
        progress.skipped_steps += 1
    else:
        progress.epoch_loss += loss
        progress.epoch_steps += 1
    for batch in batches:
        run.lost.update(batch.losses)
        for example in batch.examples:
            logger.warning("lost: %s", example)
    run.loader_state = batches[-1].state


def _log_step(run: Run, meter: Meter) -> None:
    figures, progress = meter.take(), run.progress
    lost = run.lost_by_cause().total()
    run.record(
        "train",
        step=progress.step,
        epoch=run.epoch,
        **figures,
        peak_memory_bytes=peak_memory_bytes(run.world.device),
        skipped_steps=progress.skipped_steps,
        lost_samples=lost,
    )
    logger.info(
        "%s of %s samples (%.0f %%): loss %.4f, lr %.2e, scale %.1f, grad %.2f, %.0f samples/s, wait %.0f %%",
        f"{progress.samples:,}",
        f"{run.clock.total_samples:,}",
        100 * progress.samples / run.clock.total_samples,
        *(figures[name] for name in ("loss", "lr", "logit_scale", "grad_norm", "samples_per_second")),
        100 * figures["data_wait"],
    )
    if progress.skipped_steps:
        logger.warning("%d steps so far were not finite and were skipped", progress.skipped_steps)
    if figures["data_wait"] > MUCH_DATA_WAIT:
        logger.info("training waits for data; more --workers or faster storage would help")


def _progress_bar(run: Run) -> tqdm[Any]:
    """A live line on a terminal; nothing where output goes to a file."""
    return tqdm(
        total=run.clock.total_samples,
        initial=run.progress.samples,
        unit=" samples",
        unit_scale=True,
        desc=run.config.name,
        disable=None if run.world.is_main else True,
    )
