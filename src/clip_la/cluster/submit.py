"""`clip-la submit`: the plan of a run for people, its warnings, and the sbatch command.

Plain sbatch rather than submitit: what has to survive preemption and time limits is a shell that hears
Slurm's signals and requeues its own job, and the same files must work without this command.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clip_la.cluster.plan import Plan, make_plan
from clip_la.cluster.preflight import GIB, config_from_arguments, problems
from clip_la.config import ConfigError, RunConfig
from clip_la.data.source import open_units
from clip_la.model_size import NotEstimatedError
from clip_la.train.specs import train_spec

H200_BYTES = 141e9  # NVIDIA's data sheet
REFERENCE_BATCH, REFERENCE_LR = 32_768, 5e-4  # OpenCLIP's LAION-400M recipe
MUCH_WARMUP = 0.1


@dataclass(frozen=True)
class Job:
    """What `clip-la submit` is told beside the run's own flags."""

    config: Path
    nodes: int
    gpus_per_node: int = 8
    time: str | None = None
    sbatch: str = ""
    script: Path = Path("slurm/train.sbatch")
    utilisation: float = 0.15

    @property
    def num_gpus(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.gpus_per_node

    def command(self, name: str, flags: Sequence[str]) -> list[str]:
        """The sbatch command; a second job of the same name waits for the first (singleton)."""
        options = [
            f"--job-name={name}",
            f"--nodes={self.nodes}",
            f"--gpus-per-node={self.gpus_per_node}",
            f"--ntasks-per-node={self.gpus_per_node}",
            "--dependency=singleton",
            *([f"--time={self.time}"] if self.time else []),
            *shlex.split(self.sbatch),
        ]
        return ["sbatch", *options, str(self.script), str(self.config), *flags]


def submit(job: Job, flags: Sequence[str], *, dry_run: bool) -> int:
    """Print the plan, refuse what the preflight would, and call sbatch.

    Raises:
        ConfigError: a config that can't be used, or no sbatch file where it was looked for.
    """
    if job.nodes < 1 or job.gpus_per_node < 1 or not 0 < job.utilisation <= 1:
        raise ConfigError(
            f"--nodes {job.nodes}, --gpus-per-node {job.gpus_per_node}, --utilisation {job.utilisation}; "
            "expected at least 1, at least 1, and a share above 0 up to 1"
        )
    config = config_from_arguments([str(job.config), *flags])
    try:
        plan = make_plan(config, job.num_gpus, epoch_samples(config))
    except NotEstimatedError as error:
        print(f"warning: no plan of {config.model}: {error}")
    else:
        print(format_plan(config, plan, job))
        for warning in recipe_warnings(config, plan):
            print(f"warning: {warning}")
    found = list(problems(config, job.num_gpus, sample=True))
    for problem in found:
        print(f"problem: {problem}")
    command = job.command(str(config.name), flags)
    print(("would run: " if dry_run else "running: ") + shlex.join(command))
    if found and not dry_run:
        raise ConfigError("not submitted: see the problems above")
    return 0 if dry_run else _run(command, job.script)


def _run(command: Sequence[str], script: Path) -> int:
    if not script.is_file():
        raise ConfigError(f"no {script} here; call this in a clone of the repository, or give --script")
    try:
        return subprocess.run(command, check=False).returncode
    except FileNotFoundError:
        raise ConfigError(
            "no sbatch on this machine; submit from a login node of the cluster, or look with --dry-run"
        ) from None


def epoch_samples(config: RunConfig) -> int:
    """Samples of a virtual epoch: --train-num-samples, else as recorded beside the shards."""
    if config.train_num_samples is not None:
        return config.train_num_samples
    return open_units(train_spec(config, 0, 1)).count_samples()


def format_plan(config: RunConfig, plan: Plan, job: Job) -> str:
    """The plan as lines for people; what is estimated says so."""
    checkpointing = "recomputed (--grad-checkpointing)" if config.grad_checkpointing else "kept"
    hours = plan.hours(job.num_gpus, job.utilisation)
    rows = [
        ("run", f"{config.name}: {config.model}, {plan.num_parameters / 1e6:,.1f} M parameters"),
        ("GPUs", f"{job.num_gpus} = {job.nodes} nodes x {job.gpus_per_node}"),
        (
            "global batch",
            f"{plan.global_batch:,} = {config.batch_size:,} x {config.accum_freq} micro-steps x "
            f"{job.num_gpus} GPUs",
        ),
        ("length", f"{plan.num_samples:,} samples in {plan.num_steps:,} steps, {config.epochs} epochs"),
        ("warm-up", f"{config.warmup:,} steps, {config.warmup / plan.num_steps:.1%} of the run"),
        (
            "compute",
            f"about {plan.sample_flops / 1e9:,.1f} GFLOPs a sample, "
            f"{plan.sample_flops * plan.num_samples:.2e} in all (estimate)",
        ),
        (
            "time",
            f"about {hours:,.0f} hours, {plan.num_samples / hours / 3600:,.0f} samples a second, at "
            f"{job.utilisation:.0%} of an H200's 989 TFLOP/s (estimate)",
        ),
        (
            "memory",
            f"about {plan.gpu_bytes / GIB:,.0f} GiB a GPU of {H200_BYTES / GIB:,.0f}, activations "
            f"{checkpointing} (estimate)",
        ),
        (
            "checkpoints",
            f"about {plan.checkpoint_bytes / GIB:,.1f} GiB each, {plan.num_kept_checkpoints} files "
            f"(estimate); {_save_frequency(config)}",
        ),
    ]
    return "\n".join(f"{label:<14}{value}" for label, value in rows)


def _save_frequency(config: RunConfig) -> str:
    every = [
        f"{config.save_frequency} epochs" if config.save_frequency else None,
        f"{config.save_every_samples:,} samples" if config.save_every_samples else None,
        f"{config.save_every_minutes:g} minutes" if config.save_every_minutes else None,
    ]
    return "saved every " + ", every ".join(text for text in every if text) + ", and when stopped"


def recipe_warnings(config: RunConfig, plan: Plan) -> list[str]:
    """What in the learning rate, warm-up, batch and memory is far from what is known to work."""
    found = []
    expected = REFERENCE_LR * (plan.global_batch / REFERENCE_BATCH) ** 0.5
    if config.opt == "adamw" and not expected / 4 <= config.lr <= max(2 * expected, REFERENCE_LR):
        found.append(
            f"--lr is {config.lr:g}; OpenCLIP's {REFERENCE_LR:g} at batch {REFERENCE_BATCH:,}, scaled with "
            f"the batch's square root, is {expected:.1e}"
        )
    if config.warmup >= plan.num_steps:
        found.append(
            f"the warm-up of {config.warmup:,} steps is as long as the run ({plan.num_steps:,} steps): the "
            "learning rate never reaches its peak; lower --warmup"
        )
    elif config.warmup > MUCH_WARMUP * plan.num_steps:
        found.append(
            f"the warm-up takes {config.warmup / plan.num_steps:.0%} of the run; lower --warmup "
            f"(2,000 steps of 390,625 are {2000 / 390_625:.1%} in OpenCLIP's recipe)"
        )
    elif not config.warmup and not config.skip_scheduler:
        found.append("--warmup is 0: the first steps at the full learning rate may diverge")
    if plan.gpu_bytes > H200_BYTES:
        way = (
            "a smaller --batch-size with more --accum-freq"
            if config.grad_checkpointing
            else "--grad-checkpointing"
        )
        found.append(
            f"about {plan.gpu_bytes / GIB:.0f} GiB won't fit an H200's {H200_BYTES / GIB:.0f}; use {way}"
        )
    elif plan.gpu_bytes > 0.8 * H200_BYTES:
        found.append(f"about {plan.gpu_bytes / GIB:.0f} GiB is close to an H200's {H200_BYTES / GIB:.0f}")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `Job`; those of `clip-la train` that follow are left to `submit`."""
    add = parser.add_argument
    add("config", type=Path, metavar="CONFIG", help="YAML file of the run")
    add("--nodes", type=int, required=True, help="nodes of the job")
    add("--gpus-per-node", type=int, default=Job.gpus_per_node, help="one task each (default: %(default)s)")
    add("--time", default=None, help="time limit (default: the sbatch file's)")
    add(
        "--sbatch", default="", metavar="OPTIONS", help="other sbatch options, as '--account=x --partition=y'"
    )
    add("--script", type=Path, default=Job.script, help="what is submitted (default: %(default)s)")
    add(
        "--utilisation",
        type=float,
        default=Job.utilisation,
        help="share of the GPUs' peak in the estimate of hours; OpenCLIP's published LAION-400M runs come to "
        "0.13 to 0.16 (default: %(default)s)",
    )
    add("--dry-run", action="store_true", help="show everything and submit nothing")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code, or sbatch's."""
    job = Job(**{name: getattr(args, name) for name in Job.__dataclass_fields__})
    return submit(job, args.rest, dry_run=args.dry_run)
