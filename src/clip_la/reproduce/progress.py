"""How far many trainings are: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from clip_la.config import RunConfig

logger = logging.getLogger(__name__)

_SECONDS_A_LINE = 60.0
_TAIL_BYTES = 1 << 16  # holds the last lines of a metrics.jsonl


class Progress:
    """Work is samples times their cost; what had been done before doesn't count as fast work.

    Args:
        title: in front of every line.
        configs: of all trainings.
        costs: by name.
        waiting: those that still have to run.
    """

    def __init__(
        self,
        title: str,
        configs: Sequence[RunConfig],
        costs: Mapping[str, float],
        waiting: Sequence[RunConfig],
    ) -> None:
        self._title = title
        self._work = {
            str(config.name): costs[str(config.name)] * _samples_total(config) for config in configs
        }
        left = {str(config.name) for config in waiting}
        self._done = {name: work for name, work in self._work.items() if name not in left}
        self._ahead = len(left)
        self._start_done = sum(self._done.values()) + sum(map(self._work_done, waiting))
        self._started = time.monotonic()
        self._last_line = -_SECONDS_A_LINE
        self._bar = tqdm(
            total=sum(self._work.values()),
            initial=self._start_done,
            desc=title,
            disable=not sys.stderr.isatty(),
            smoothing=0.0,
            bar_format="{desc}: {percentage:.0f} % |{bar:20}| {elapsed}, {remaining} left{postfix}",
        )

    def __enter__(self) -> Progress:
        if len(self._done) and self._ahead:
            self.say(f"{len(self._done)} of {len(self._work)} have finished before")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._bar.disable:
            logger.info("%s: %s", self._title, text)
        else:
            self._bar.write(f"{self._title}: {text}", file=sys.stderr)

    def ended(self, name: str) -> None:
        """One has ended, and is done."""
        self._done[name] = self._work[name]
        self.say(f"{len(self._done)} of {len(self._work)}: {name} done")

    def show(self, running: Sequence[RunConfig]) -> None:
        """Where all of them are now; cheap enough to be called twice a second."""
        done = sum(self._done.values()) + sum(map(self._work_done, running))
        states = ", ".join(f"{config.name} {_share_done(config):.0%}" for config in running)
        if not self._bar.disable:
            self._bar.n = done
            self._bar.set_postfix_str(f"{len(self._done)} of {len(self._work)} done; {states}", refresh=True)
        elif running and time.monotonic() - self._last_line >= _SECONDS_A_LINE:
            self._last_line = time.monotonic()
            share = done / sum(self._work.values())
            self.say(f"{share:.0%}, {self._time_left(done)}; now {states}")

    def _time_left(self, done: float) -> str:
        gained = done - self._start_done
        if gained <= 0:
            return "time left not known yet"
        seconds = (time.monotonic() - self._started) * (sum(self._work.values()) - done) / gained
        return f"about {seconds / 60:.0f} min left"

    def _work_done(self, config: RunConfig) -> float:
        return self._work[str(config.name)] * _share_done(config)


def _samples_total(config: RunConfig) -> int:
    return config.epochs * (config.train_num_samples or 0)


def _share_done(config: RunConfig) -> float:
    """Of a training's samples, from the newest whole line of its metrics."""
    metrics = Path(config.logs) / str(config.name) / "metrics.jsonl"
    try:
        with metrics.open("rb") as file:
            file.seek(max(metrics.stat().st_size - _TAIL_BYTES, 0))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return 0.0
    for line in reversed(lines):
        try:
            samples = int(json.loads(line)["samples"])
        except (ValueError, KeyError, TypeError):  # torn, or cut by the seek
            continue
        return min(samples / _samples_total(config), 1.0)
    return 0.0
