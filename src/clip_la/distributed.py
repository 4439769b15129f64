"""One process or many: who am I, and what do all ranks agree on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class LaunchError(RuntimeError):
    """The environment describes a launch that can't work; the message says what is missing."""


@dataclass(frozen=True)
class World:
    """This process among all: its rank, the number of ranks, its device."""

    rank: int
    local_rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes files."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there is anybody to talk to."""
        return self.size > 1

    def sum(self, *values: float) -> list[float]:
        """Each value summed over ranks, in float64. A collective: all ranks must call it."""
        if not self.is_distributed:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order, on every rank. A collective."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank. A collective."""
        if not self.is_distributed:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]


@dataclass(frozen=True)
class Launch:
    """What the environment says of this process: torchrun's variables, Slurm's, or neither."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1


def read_launch(env: Mapping[str, str]) -> Launch:
    """Rank and world size from torchrun's or srun's variables.

    Raises:
        LaunchError: variables that contradict each other or leave the world size open.
    """
    if "WORLD_SIZE" in env:
        return Launch(int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0)), int(env["WORLD_SIZE"]))
    if "SLURM_PROCID" not in env:
        return Launch()
    size = env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or env.get("SLURM_NPROCS")
    rank = int(env["SLURM_PROCID"])
    if size is None and rank > 0:
        raise LaunchError(
            f"SLURM_PROCID is {rank} but neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS says how many tasks "
            "there are; start the job with srun and give --ntasks"
        )
    launch = Launch(rank, int(env.get("SLURM_LOCALID", 0)), int(size or 1))
    if launch.rank >= launch.size:
        raise LaunchError(
            f"SLURM_PROCID is {launch.rank}, but there are {launch.size} task(s); start the job with srun"
        )
    return launch


def init_world(device: str, backend: str | None = None, timeout_minutes: float = 30.0) -> World:
    """Join the process group that the environment describes, if any.

    Args:
        device: "auto", "cuda" or "cpu".
        backend: "nccl" or "gloo"; None chooses by device.
        timeout_minutes: how long a collective waits before the job is ended.
    """
    launch = read_launch(os.environ)
    use_cuda = torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
    if use_cuda and not torch.cuda.is_available():
        raise LaunchError(
            "--device cuda, but torch sees no CUDA device; use --device cpu or a machine with a GPU"
        )
    if use_cuda and launch.local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"local rank {launch.local_rank}, {torch.cuda.device_count()} visible GPUs; start one task a GPU"
        )
    chosen = torch.device("cuda", launch.local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(chosen)
    if launch.size > 1 and not dist.is_initialized():
        _set_rendezvous(os.environ)
        dist.init_process_group(
            backend or ("nccl" if use_cuda else "gloo"),
            rank=launch.rank,
            world_size=launch.size,
            timeout=timedelta(minutes=timeout_minutes),
        )
    return World(launch.rank, launch.local_rank, launch.size, chosen)


def _set_rendezvous(env: Any) -> None:
    """Fill in MASTER_ADDR and MASTER_PORT from Slurm where the launcher left them out."""
    if "MASTER_ADDR" not in env:
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
        if not nodes:
            raise LaunchError("more than one task, but no MASTER_ADDR; set it to the first node's host name")
        env["MASTER_ADDR"] = _first_host(nodes)
    # Two jobs may share a node, so the port comes from the job id.
    env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "9500")) % 20000))


def _first_host(nodes: str) -> str:
    try:
        hosts = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=30
        ).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"can't expand the node list {nodes!r} ({error}); set MASTER_ADDR") from error
    return hosts[0]


def leave_world() -> None:
    """Leave the process group, if one was joined."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
