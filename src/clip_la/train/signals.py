"""Signals ask for a stop at the next step; a second one stops at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """While entered, SIGTERM, SIGUSR1 and SIGINT only leave a note; the second one has its default effect."""

    def __init__(self) -> None:
        self._received: int | None = None
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._received is not None

    @property
    def signal_name(self) -> str | None:
        """Such as SIGTERM; None when none has come."""
        return None if self._received is None else signal.Signals(self._received).name

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._received = number
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_DFL)
