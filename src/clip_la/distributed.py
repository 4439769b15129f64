"""One process or many: who am I, and what do all ranks agree on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from clip_la.errors import ExpectedError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


SLURM_SIZES = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")


class LaunchError(ExpectedError):
    """The environment describes a launch that can't work; the message says what is missing."""


@dataclass(frozen=True)
class World:
    """This process among all: its rank, the number of ranks, its device, and where several ranks met."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    store: Store | None = None

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
        LaunchError: variables that contradict each other, or leave the rank or the world size open.
    """
    rank = _number(env, "RANK", "SLURM_PROCID")
    # Outside a task, as in the shell of salloc, Slurm's number of tasks is not this process's business.
    size = _number(env, "WORLD_SIZE", *(SLURM_SIZES if "SLURM_PROCID" in env else ()))
    if rank is None and size is not None and size > 1:
        raise LaunchError(
            f"WORLD_SIZE is {size}, but neither RANK nor SLURM_PROCID says which of them this process is; "
            "start the job with torchrun or srun"
        )
    if size is None and rank:
        raise LaunchError(
            f"this is rank {rank}, but none of WORLD_SIZE, {', '.join(SLURM_SIZES)} says how many there are; "
            "start the job with torchrun, or with srun and --ntasks"
        )
    launch = Launch(rank or 0, _number(env, "LOCAL_RANK", "SLURM_LOCALID") or 0, size or 1)
    if launch.rank >= launch.size:
        raise LaunchError(
            f"this is rank {launch.rank}, but there are {launch.size} task(s); "
            "start the job with torchrun or srun"
        )
    return launch


def _number(env: Mapping[str, str], *names: str) -> int | None:
    """The first of the variables that is set; None where none is."""
    name = next((name for name in names if env.get(name)), None)
    if name is None:
        return None
    if not env[name].isdecimal():
        raise LaunchError(f"{name} is {env[name]!r}; expected a whole number")
    return int(env[name])


def gpu_of(launch: Launch, num_visible: int, env: Mapping[str, str]) -> int:
    """Which GPU is a process's: the only one it sees (`srun --gpus-per-task=1`), else its local rank's.

    Raises:
        LaunchError: more processes than GPUs on this machine.
    """
    # Only torchrun says how many processes share the machine; tasks of Slurm may each see one GPU of several.
    if num_visible == 1 and (_number(env, "LOCAL_WORLD_SIZE") or 1) == 1:
        return 0
    if launch.local_rank >= num_visible:
        raise LaunchError(f"local rank {launch.local_rank}, {num_visible} visible GPUs; start one task a GPU")
    return launch.local_rank


def init_world(device: str, backend: str | None = None, timeout_minutes: float = 30.0) -> World:
    """Join the process group that the environment describes, if any.

    Args:
        device: "auto", "cuda" or "cpu".
        backend: "nccl" or "gloo"; None chooses by device.
        timeout_minutes: how long a collective waits before the job is ended.

    Raises:
        LaunchError: the environment or the device can't work, or the ranks don't find each other.
    """
    launch = read_launch(os.environ)
    use_cuda = torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
    if use_cuda and not torch.cuda.is_available():
        raise LaunchError(
            "--device cuda, but torch sees no CUDA device; use --device cpu or a machine with a GPU"
        )
    chosen = torch.device("cpu")
    if use_cuda:
        chosen = torch.device("cuda", gpu_of(launch, torch.cuda.device_count(), os.environ))
        torch.cuda.set_device(chosen)
    store = None
    if launch.size > 1:
        store = _meet(launch, backend or ("nccl" if use_cuda else "gloo"), timedelta(minutes=timeout_minutes))
    return World(launch.rank, launch.local_rank, launch.size, chosen, store)


def _meet(launch: Launch, backend: str, timeout: timedelta) -> Store:
    """Join the process group; what the ranks then share is the store."""
    _set_rendezvous(os.environ)
    store: Store
    try:
        store, _, _ = next(rendezvous("env://", launch.rank, launch.size, timeout=timeout))
        dist.init_process_group(
            backend, store=store, rank=launch.rank, world_size=launch.size, timeout=timeout
        )
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LaunchError(
            f"the {launch.size} ranks didn't meet at {where} within {timeout}: a rank ended before it came "
            f"(see its own output), or the address can't be reached, or the port is taken ({error})"
        ) from error
    return store


def _set_rendezvous(env: MutableMapping[str, str]) -> None:
    """Fill in MASTER_ADDR and MASTER_PORT from Slurm where the launcher left them out."""
    if "MASTER_ADDR" not in env:
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
        if not nodes:
            raise LaunchError("more than one task, but no MASTER_ADDR; set it to the first node's host name")
        env["MASTER_ADDR"] = _first_host(nodes)
    # Two jobs may share a node, so the port comes from the job id.
    env.setdefault("MASTER_PORT", str(20000 + (_number(env, "SLURM_JOB_ID") or 9500) % 20000))


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
