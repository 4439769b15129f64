"""Sums and lists over the ranks of `torch.distributed`; with one process, they are what they were given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

_T = TypeVar("_T")


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) where nothing is distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def sum_over_ranks(counts: Tensor) -> Tensor:
    """The elementwise sum of an int64 tensor over all ranks, on the CPU."""
    if rank_and_world_size()[1] == 1:
        return counts.cpu()
    on_device = counts.to("cuda" if dist.get_backend() == "nccl" else "cpu", copy=True)
    dist.all_reduce(on_device)
    return on_device.cpu()


def gather_over_ranks(value: _T) -> list[_T]:
    """The value of every rank, in order of ranks. The value is pickled."""
    world_size = rank_and_world_size()[1]
    if world_size == 1:
        return [value]
    gathered: list[_T | None] = [None] * world_size
    dist.all_gather_object(gathered, value)
    return gathered  # type: ignore[return-value]


@contextmanager
def failing_together() -> Iterator[None]:
    """If the block raises on any rank, raise on every rank, so that none waits for one that has given up.

    Raises:
        RuntimeError: naming the ranks and their errors; on one process, the error itself is passed on.
    """
    error = None
    try:
        yield
    except Exception as caught:
        if rank_and_world_size()[1] == 1:
            raise
        error = caught
    messages = gather_over_ranks(None if error is None else f"{type(error).__name__}: {error}")
    failed = [f"rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]
    if failed:
        raise RuntimeError("; ".join(failed)) from error
