"""What is in a set of shards or a table before a job is queued: usable pairs, and every loss by cause."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from tqdm import tqdm

from clip_la.data.captions import CaptionEncoder
from clip_la.data.decode import Unusable, decode_image
from clip_la.data.losses import Loss, LossCounter
from clip_la.data.samples import RawSample
from clip_la.data.source import Source, open_units
from clip_la.data.spec import DataSpec
from clip_la.data.tables import Table
from clip_la.data.urls import ShardListError, count_samples

ROWS_TOGETHER = 1000


@dataclass
class PartReport:
    """What one shard, or one stretch of a table's rows, holds.

    Attributes:
        name: the shard's URL, or the table's path and rows.
        num_pairs: samples with an image and a text.
        num_usable: those of them that a training run would use.
        num_recorded: what sizes.json or *_stats.json says; None where neither does.
        losses: everything else, by cause, with the first of each.
        short_sides: how many usable pictures have which shorter side, in pixels.
        num_caption_bytes: of the usable pairs' texts.
    """

    name: str
    num_pairs: int = 0
    num_usable: int = 0
    num_recorded: int | None = None
    losses: LossCounter = field(default_factory=LossCounter)
    short_sides: Counter[int] = field(default_factory=Counter)
    num_caption_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """A JSON-safe dict."""
        return {
            "name": self.name,
            "pairs": self.num_pairs,
            "usable": self.num_usable,
            "recorded": self.num_recorded,
            "losses": self.losses.to_counts(),
            "examples": [loss.to_dict() for loss in self.losses.first.values()],
        }


@dataclass
class CheckReport:
    """The parts of a data set and their sums."""

    parts: list[PartReport]

    @property
    def num_usable(self) -> int:
        """Pairs that a training run would use."""
        return sum(part.num_usable for part in self.parts)

    @property
    def losses(self) -> LossCounter:
        """All losses by cause, with the first of each."""
        losses = LossCounter()
        for part in self.parts:
            losses.merge(part.losses)
        return losses

    @property
    def is_clean(self) -> bool:
        """Whether there is something to use and nothing was lost."""
        return self.num_usable > 0 and len(self.losses) == 0

    def to_dict(self) -> dict[str, Any]:
        """A JSON-safe dict; sides in pixels, captions in bytes."""
        losses = self.losses
        sides: Counter[int] = sum((part.short_sides for part in self.parts), Counter())
        caption_bytes = sum(part.num_caption_bytes for part in self.parts)
        return {
            "usable": self.num_usable,
            "pairs": sum(part.num_pairs for part in self.parts),
            "shards": len(self.parts),
            "clean": self.is_clean,
            "losses": losses.to_counts(),
            "examples": [loss.to_dict() for loss in losses.first.values()],
            "short_side": _quantiles(sides),
            "mean_caption_bytes": caption_bytes / self.num_usable if self.num_usable else None,
            "parts": [part.to_dict() for part in self.parts],
        }


def check_data(
    spec: DataSpec,
    tokenize: Callable[[list[str]], torch.Tensor],
    *,
    workers: int = 0,
    progress: bool = True,
) -> CheckReport:
    """Read and decode everything that `spec.train_data` names, as training would.

    Args:
        spec: what to read; the batch, epoch and rank settings play no part.
        tokenize: list of n str -> (n, L) int64, as in training.
        workers: processes; 0 works in this one.
        progress: show a bar on stderr.

    Raises:
        ShardListError, TableError: nothing to read.
    """
    source = open_units(spec)
    checker = _Checker(source, spec, tokenize)
    num_parts = len(checker.parts())
    if workers:
        context = multiprocessing.get_context(spec.start_method)
        with ProcessPoolExecutor(workers, context, _set_checker, (checker,)) as pool:
            parts = list(_show(pool.map(_check_part, checker.parts()), num_parts, progress))
    else:
        parts = list(_show(map(checker.check, checker.parts()), num_parts, progress))
    return CheckReport(parts)


class _Checker:
    """Checks parts of a source; what a worker process holds."""

    def __init__(self, source: Source, spec: DataSpec, tokenize: Callable[[list[str]], torch.Tensor]) -> None:
        self._source = source
        self._spec = spec
        self._encode_caption = CaptionEncoder(tokenize, spec.limits, spec.empty_caption)

    def parts(self) -> Sequence[range]:
        """Units that make one part of the report."""
        step = ROWS_TOGETHER if isinstance(self._source, Table) else 1
        size = len(self._source)
        return [range(start, min(start + step, size)) for start in range(0, size, step)]

    def check(self, units: range) -> PartReport:
        """Read and decode one part."""
        report = self._start(units)
        for unit in units:
            for item in self._source.read(unit):
                if isinstance(item, Loss):
                    report.losses.add(item)
                else:
                    self._add(report, item)
        return report

    def _start(self, units: range) -> PartReport:
        if isinstance(self._source, Table):
            return PartReport(f"{self._source.path} rows {units.start}-{units.stop - 1}")
        url = self._source.name(units.start)
        try:
            return PartReport(url, num_recorded=count_samples([url], self._spec.open_options))
        except ShardListError:
            return PartReport(url)

    def _add(self, report: PartReport, sample: RawSample) -> None:
        report.num_pairs += 1
        try:
            self._encode_caption(sample.text)
            image = self._decode(sample)
        except Unusable as error:
            report.losses.add(Loss(error.cause, sample.shard, sample.key, error.detail))
            return
        report.num_usable += 1
        report.short_sides[min(image.size)] += 1
        report.num_caption_bytes += len(sample.text)

    def _decode(self, sample: RawSample) -> Image.Image:
        return decode_image(
            sample.image,
            self._spec.limits,
            background=self._spec.background,
            exif_orientation=self._spec.exif_orientation,
        )


_checker: _Checker | None = None


def _set_checker(checker: _Checker) -> None:
    global _checker
    _checker = checker


def _check_part(units: range) -> PartReport:
    assert _checker is not None
    return _checker.check(units)


def _show(reports: Iterator[PartReport], num_parts: int, progress: bool) -> Iterator[PartReport]:
    num_usable = num_lost = 0
    with tqdm(reports, total=num_parts, unit="shard", disable=not progress) as bar:
        for report in bar:
            num_usable += report.num_usable
            num_lost += len(report.losses)
            bar.set_postfix(usable=num_usable, lost=num_lost, refresh=False)
            yield report


def _quantiles(counts: Counter[int]) -> dict[str, int] | None:
    """Least, median and greatest of the values that were counted."""
    if not counts:
        return None
    ordered = sorted(counts.elements())
    return {"least": ordered[0], "median": ordered[len(ordered) // 2], "greatest": ordered[-1]}
