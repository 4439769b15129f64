"""Sums and lists over the ranks of `torch.distributed`; with one process, they are what they were given."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from clip_la.errors import ExpectedError

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_MESSAGE_SAYS_ALL = (ValueError, OSError)


class RanksError(ExpectedError):
    """Some ranks failed, and so all did; the message names them and their errors."""


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


def from_rank_0(value: _T) -> _T:
    """Rank 0's value, on every rank. The value is pickled."""
    if rank_and_world_size()[1] == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def share(items: Sequence[_T]) -> Sequence[_T]:
    """This rank's share of the items: one in so many."""
    rank, world_size = rank_and_world_size()
    return items[rank::world_size]


def interleave(shares: Sequence[Sequence[_T]], num_items: int) -> list[_T]:
    """All items in their order again, from what every rank made of its `share`."""
    return [shares[index % len(shares)][index // len(shares)] for index in range(num_items)]


def split(items: Sequence[_T], part: int, num_parts: int) -> Sequence[_T]:
    """One of `num_parts` runs of the items, whose lengths differ by at most one."""
    return items[part * len(items) // num_parts : (part + 1) * len(items) // num_parts]


@contextmanager
def failing_together() -> Iterator[None]:
    """If the block raises on any rank, raise on every rank, so that none waits for one that has given up.

    Raises:
        RanksError: naming the ranks and their errors; on one process, the error itself is passed on.
    """
    error = None
    try:
        yield
    except Exception as caught:
        if rank_and_world_size()[1] == 1:
            raise
        if not isinstance(caught, _MESSAGE_SAYS_ALL):
            _logger.exception("unexpected error")
        error = caught
    messages = gather_over_ranks(None if error is None else f"{type(error).__name__}: {error}")
    failed = [f"rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]
    if failed and len(set(messages)) == 1:
        raise RanksError(f"every rank: {messages[0]}") from error
    if failed:
        raise RanksError("; ".join(failed)) from error
