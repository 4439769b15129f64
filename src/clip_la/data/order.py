"""The order of everything: a pure function of (seed, epoch, rank, worker), and a place in it.

A unit is a shard, or a row of a table. In each pass of a virtual epoch a reader goes through its
share of the units in an order of its own; the raw samples it meets are cut into blocks, and each
block is shuffled. Nothing of this depends on which samples can be decoded, so a Position is a
handful of numbers and reading goes on from it exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Position:
    """Where a reader stands inside its virtual epoch.

    Attributes:
        pass_number: how often the reader has been through its share.
        is_wide: this pass goes over all units, because the share alone gave no batch.
        num_batches: batches that this pass has given.
        unit, sample: where the current block begins: index in the pass's order, raw sample in it.
        block: number of the block in the pass.
        offset: raw samples of the shuffled block that have been used.
    """

    pass_number: int = 0
    is_wide: bool = False
    num_batches: int = 0
    unit: int = 0
    sample: int = 0
    block: int = 0
    offset: int = 0

    def to_dict(self) -> dict[str, int]:
        """The same as a JSON-safe dict."""
        return {name: int(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, int]) -> Position:
        """The Position that `to_dict` wrote."""
        return cls(**{**values, "is_wide": bool(values["is_wide"])})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Reader:
    """One reading process among all ranks' readers, in one virtual epoch."""

    seed: int
    epoch: int
    number: int
    num_readers: int

    def plan(
        self, num_units: int, position: Position, weights: Sequence[float] | None, resampled: bool
    ) -> npt.NDArray[np.int64]:
        """The units of the pass at `position`, in order."""
        if resampled and not position.is_wide:
            return self._draw(num_units, position.pass_number, weights)
        units: npt.NDArray[np.int64] = _generator("epoch", self.seed, self.epoch).permutation(num_units)
        if position.is_wide:
            start = num_units * self.number // self.num_readers
            return np.concatenate([units[start:], units[:start]])
        share: npt.NDArray[np.int64] = units[self.number :: self.num_readers].copy()
        if position.pass_number:
            self._generator("pass", position.pass_number).shuffle(share)
        return share

    def _draw(
        self, num_units: int, pass_number: int, weights: Sequence[float] | None
    ) -> npt.NDArray[np.int64]:
        probabilities = None if weights is None else np.asarray(weights) / np.sum(weights)
        generator = self._generator("draw", pass_number)
        draw: npt.NDArray[np.int64] = generator.choice(num_units, size=num_units, p=probabilities)
        return draw

    def shuffle(self, num_samples: int, position: Position) -> npt.NDArray[np.int64]:
        """The order of the raw samples of the block at `position`."""
        generator = self._generator("block", position.pass_number, position.is_wide, position.block)
        return generator.permutation(num_samples)

    def sample_seed(self, position: Position) -> int:
        """A 64-bit seed for the random augmentation of the raw sample at `position`."""
        place = (position.pass_number, position.is_wide, position.block, position.offset)
        return _hash("sample", *place, self.seed, self.epoch, self.number, self.num_readers)

    def _generator(self, *what: str | int) -> np.random.Generator:
        return _generator(*what, self.seed, self.epoch, self.number, self.num_readers)


def _generator(*what: str | int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(_hash(*what)))


def _hash(*what: str | int) -> int:
    text = ",".join(str(int(part) if not isinstance(part, str) else part) for part in what)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
