"""Launching Triton kernels: what they are compiled for, views of tensors, groups of tokens, records."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clip_la.attention.contract import Inputs

View = tuple[Tensor, int, int, int]
"""A tensor (B, H, N, D) as kernels take it: with its strides of B, H and N."""

GROUP_TOKENS = 1024
"""Fewest tokens that a program works on where a head's are shared among several."""

_PROGRAMS_PER_MULTIPROCESSOR = 4
"""With fewer heads than that, long sequences are cut in groups."""

_H200_MULTIPROCESSORS = 132
_ALIGNMENT = 8
"""Elements; in all dtypes at least the 16 bytes of the widest load."""
_MAX_ROW_STRIDE = 2**24
"""So that an offset within a tile of up to 128 rows takes 32 bits; where tiles begin takes 64."""


@dataclass(frozen=True)
class Config:
    """What a kernel is compiled for; nothing depends on the number of tokens.

    Attributes:
        D, E: size of a row of q and k, and of v.
        BLOCK_D, BLOCK_E: these, padded to powers of two.
        BLOCK: tokens in a tile.
        NORMALISE: rows of q and k are divided by their norms.
        EQ4: there is a denominator.
        KEEP_EXACT: Eq. 4's output is stored before rounding too.
        CENTRE: v less its mean over the keys takes the place of v.
        num_warps: warps of a program.
        num_stages: tiles in flight: one worked on, the others being loaded.
    """

    D: int
    E: int
    BLOCK_D: int
    BLOCK_E: int
    BLOCK: int
    NORMALISE: bool
    EQ4: bool
    KEEP_EXACT: bool
    CENTRE: bool
    num_warps: int
    num_stages: int

    @property
    def SUM_KEYS(self) -> bool:  # noqa: N802
        """Whether there is a kappa."""
        return self.EQ4 or self.CENTRE

    @property
    def NUM_SUMS(self) -> int:  # noqa: N802 - read in kernels, as the other sizes are
        """Numbers in S, z and kappa."""
        return self.D * self.E + self.E + self.D

    def group_size(self, num_tokens: int, groups: int) -> int:
        """Tokens in a group: full tiles."""
        return math.ceil(max(num_tokens, 1) / (groups * self.BLOCK)) * self.BLOCK


class Launch(NamedTuple):
    """One call of a kernel: all that is needed to compile it, or to run it."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    config: Config


_recordings: list[list[Launch]] = []


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Within it kernels are listed, not run; tensors may be on "meta"."""
    launches: list[Launch] = []
    _recordings.append(launches)
    try:
        yield launches
    finally:
        _recordings.pop()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, config: Config) -> None:
    """Run a kernel on the grid, unless that is empty."""
    if 0 in grid:
        return
    if _recordings:
        _recordings[-1].append(Launch(kernel, grid, arguments, config))
        return
    kernel[grid](*arguments, config, num_warps=config.num_warps, num_stages=config.num_stages)


def config_of(inputs: Inputs, *, block: int, num_warps: int, num_stages: int) -> Config:
    """The config for inputs like these."""
    D, E, options = inputs.q.shape[-1], inputs.v.shape[-1], inputs.options
    return Config(
        D=D,
        E=E,
        BLOCK_D=padded(D),
        BLOCK_E=padded(E),
        BLOCK=block,
        NORMALISE=options.normalise,
        EQ4=options.has_denominator,
        KEEP_EXACT=options.has_denominator and inputs.v.dtype != torch.float32,
        CENTRE=options.centre_values,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def padded(size: int) -> int:
    """A power of two, 32 at least."""
    return max(32, 1 << (size - 1).bit_length())


def view(x: Tensor) -> View:
    """x (B, H, N, D), which `is_aligned`; a dimension of size 1 has no stride to speak of."""
    B, H, N = (stride if size > 1 else 0 for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True))
    return x, B, H, N


def is_aligned(x: Tensor) -> bool:
    """Whether kernels can use x in place: whole rows, at multiples of 16 bytes, not too far apart."""
    _, *strides = view(x)
    contiguous_rows = x.stride(-1) == 1 or x.shape[-1] == 1
    at_multiples = x.data_ptr() % 16 == 0 and all(stride % _ALIGNMENT == 0 for stride in strides)
    return contiguous_rows and at_multiples and strides[-1] < _MAX_ROW_STRIDE


def aligned(x: Tensor) -> Tensor:
    """x itself if `is_aligned`, else a copy."""
    return x if is_aligned(x) else _aligned_empty(x).copy_(x)


@contextlib.contextmanager
def aligned_outputs(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """The tensors to write to: these, or, unless `is_aligned`, others, copied into these at the end."""
    written = [x if is_aligned(x) else _aligned_empty(x) for x in tensors]
    yield written
    for x, values in zip(tensors, written, strict=True):
        if x is not values:
            x.copy_(values)


def _aligned_empty(x: Tensor) -> Tensor:
    row = math.ceil(x.shape[-1] / _ALIGNMENT) * _ALIGNMENT
    return x.new_empty(*x.shape[:-1], row)[..., : x.shape[-1]]


def optional(x: Tensor) -> Tensor | None:
    """A field of `Forward`, or None where the options leave it empty."""
    return x if x.shape[-1] > 0 else None


def num_groups(num_heads: int, num_tokens: int, device: torch.device) -> int:
    """In how many groups a head's tokens are shared out: 1 if they are few, or if the heads fill the GPU."""
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device)
    if num_heads == 0 or num_heads >= wanted:
        return 1
    return max(min(math.ceil(wanted / num_heads), num_tokens // GROUP_TOKENS), 1)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Of the device; those of an H200 where kernels are interpreted or only listed."""
    if device.type != "cuda":
        return _H200_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
