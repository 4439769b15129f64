"""What can be known to be wrong with a training job before it starts, each with what to change."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import open_clip
import torch

from clip_la.bundle import resolve_model_config
from clip_la.cluster.plan import checkpoint_bytes, num_kept_checkpoints
from clip_la.cluster.restarts import give_up_reason, record_start, saved_samples
from clip_la.config import ConfigError, RunConfig
from clip_la.config_sources import add_flags, flags_given, load_run_config, refuse_unknown_flags
from clip_la.data.check import check_data
from clip_la.data.check_text import format_check
from clip_la.data.loader import TrainLoader
from clip_la.data.source import is_table
from clip_la.data.spec import DataSpec
from clip_la.data.storage import PIPE, is_remote, local_path
from clip_la.data.urls import expand_shards, sample_shards
from clip_la.exit_codes import EXIT_USAGE
from clip_la.model_size import NotEstimatedError, count_parameters
from clip_la.train.evaluators import build_evaluators
from clip_la.train.specs import train_spec

logger = logging.getLogger(__name__)

NUM_SAMPLED_SHARDS = 2
TOKENIZER = "ViT-B-16"  # of every native text tower
MISSING_SHARE = 0.01  # a download of 41,000 shards lacks a few
GIB = 2**30


class PreflightError(ValueError):
    """A job that would fail; the message says what to change."""


def config_from_arguments(arguments: Sequence[str]) -> RunConfig:
    """The run config of `CONFIG [clip-la train flags]`.

    Raises:
        ConfigError: as `clip-la train` would raise it.
    """
    parser = argparse.ArgumentParser(prog="train.sbatch", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("config", type=Path)
    add_flags(parser)
    try:
        args, rest = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    refuse_unknown_flags(rest)
    return load_run_config(args.config, flags_given(args))


def problems(config: RunConfig, world_size: int, *, sample: bool) -> Iterator[str]:
    """Everything found wrong, cheapest first.

    Args:
        config: the run.
        world_size: tasks that will train.
        sample: where all else is well, read a few shards through, as training would.
    """
    checks: list[Callable[[], str | None]] = [
        lambda: _model_problem(config),
        lambda: _missing_file_problem(config),
        lambda: _sink_problem(config),
        lambda: _data_layout_problem(config, world_size),
        lambda: _evaluation_problem(config),
        lambda: _disk_problem(config),
    ]
    found = list(dict.fromkeys(problem for check in checks if (problem := _outcome(check)) is not None))
    yield from found
    if sample and not found and (problem := _outcome(lambda: _sample_problem(config, world_size))):
        yield problem


def _outcome(check: Callable[[], str | None]) -> str | None:
    try:
        return check()
    except (ValueError, OSError) as error:
        return str(error)


def _model_problem(config: RunConfig) -> str | None:
    resolve_model_config(config.model, attention=config.attention)
    return None


def _missing_file_problem(config: RunConfig) -> str | None:
    for name in ("pretrained", "pretrained_softmax", "resume"):
        path = getattr(config, name)
        if path is not None and not Path(path).exists():
            return f"--{name.replace('_', '-')} is {path}, which is not there"
    return None


def _sink_problem(config: RunConfig) -> str | None:
    wanted = "wandb,tensorboard" if config.report_to == "all" else config.report_to
    missing = [name for name in wanted.split(",") if name and importlib.util.find_spec(name) is None]
    return f"--report-to {config.report_to} needs: pip install {' '.join(missing)}" if missing else None


def _data_layout_problem(config: RunConfig, world_size: int) -> str | None:
    """Shards that are not there, too few of them for the readers, fewer samples than a batch."""
    spec = train_spec(config, 0, world_size)
    if missing := _missing_shards(spec):
        return f"{missing}; correct --train-data, or finish the download"
    TrainLoader(spec, _unused, open_clip.get_tokenizer(TOKENIZER))
    batch = config.batch_size * config.accum_freq * world_size
    if spec.num_samples is not None and spec.num_samples < batch:
        return (
            f"--train-num-samples is {spec.num_samples:,}, fewer than one global batch of {batch:,} = "
            f"{config.batch_size} x {config.accum_freq} micro-steps x {world_size} tasks"
        )
    return None


def _evaluation_problem(config: RunConfig) -> str | None:
    """What training would find when it builds its evaluators: trees, class names, validation shards."""
    build_evaluators(config)
    if config.val_data is None:
        return None
    missing = _missing_shards(replace(train_spec(config, 0, 1), train_data=config.val_data))
    return f"{missing}; correct --val-data" if missing else None


def _missing_shards(spec: DataSpec) -> str | None:
    urls = [] if is_table(spec) else expand_shards(spec.train_data)
    missing = [url for url in urls if _is_missing(url)]
    if len(missing) <= MISSING_SHARE * len(urls):
        return None
    return f"{len(missing):,} of {len(urls):,} shards are not there, first {missing[0]}"


def _is_missing(url: str) -> bool:
    return not (is_remote(url) or url.startswith(PIPE) or Path(local_path(url)).exists())


def _unused(_: Any) -> torch.Tensor:
    raise AssertionError("nothing is decoded here")


def _disk_problem(config: RunConfig) -> str | None:
    """Fails where two checkpoints don't fit; warns where the whole run's don't. Quotas can't be seen."""
    folder = Path(config.logs).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        return f"can't write to {existing}; change --logs"
    try:
        size = checkpoint_bytes(
            count_parameters(resolve_model_config(config.model, attention=config.attention))
        )
    except NotEstimatedError as error:
        logger.warning("whether checkpoints fit the disk is not known: %s", error)
        return None
    free = shutil.disk_usage(existing).free
    if free < 2 * size:
        return (
            f"{free / GIB:.1f} GiB free at {existing}, a checkpoint takes about {size / GIB:.1f} GiB and two "
            "must fit; make room or change --logs"
        )
    needed = size * num_kept_checkpoints(config)
    if free < needed:
        logger.warning(
            "%.0f GiB free at %s; the run keeps %d checkpoints, about %.0f GiB: raise --save-frequency",
            free / GIB, existing, num_kept_checkpoints(config), needed / GIB,
        )  # fmt: skip
    return None


def _sample_problem(config: RunConfig, world_size: int) -> str | None:
    spec = train_spec(config, 0, world_size)
    if is_table(spec):
        return None  # every row is a file of its own: `clip-la check` reads them
    spec = replace(spec, train_data=sample_shards(spec.train_data, NUM_SAMPLED_SHARDS))
    tokenize = open_clip.get_tokenizer(TOKENIZER)
    report = check_data(spec, tokenize, workers=NUM_SAMPLED_SHARDS, progress=False)
    if report.num_usable == 0:
        return f"nothing usable in a sample of the training data:\n{format_check(report)}"
    if not report.is_clean:
        logger.warning("a sample of the training data:\n%s", format_check(report))
    return None


def run_preflight(arguments: Sequence[str], world_size: int, job: str, restart: int) -> Path:
    """Check a job at its start; a restart of a run that has a checkpoint reads no shards.

    Returns:
        The run's folder, made, with the start recorded.

    Raises:
        ConfigError, PreflightError: a job that would fail.
    """
    config = config_from_arguments(arguments)
    folder = Path(config.logs) / str(config.name)
    found = list(problems(config, world_size, sample=saved_samples(folder) == 0))
    if found:
        raise PreflightError("\n".join(found))
    reason = give_up_reason(folder, job)
    if reason is not None:
        raise PreflightError(reason)
    record_start(folder, job, restart)
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """What train.sbatch runs first; prints the run's folder and nothing else on stdout."""
    parser = argparse.ArgumentParser(prog="python -m clip_la.cluster.preflight", description=__doc__)
    parser.add_argument("--job", required=True, help="SLURM_JOB_ID")
    parser.add_argument("--restart", type=int, default=0, help="SLURM_RESTART_COUNT")
    parser.add_argument("--world-size", type=int, required=True, help="tasks that will train")
    parser.add_argument("arguments", nargs="+", metavar="CONFIG [flags]", help="after --")
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        folder = run_preflight(args.arguments, args.world_size, args.job, args.restart)
    except (ConfigError, PreflightError) as error:
        for line in str(error).splitlines():
            print(f"clip-la: {line}", file=sys.stderr)
        return EXIT_USAGE
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
