"""Signals ask for a stop at the end of the step; a second one stops at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """While entered, SIGTERM, SIGUSR1 and SIGINT only leave a note; the second one ends the process.

    Python runs its handlers between two instructions of the main thread, so one that waits for other ranks
    or for a device would hear nothing. A thread listens beside it, and ends the process with 128 + the
    signal's number, which is what a shell shows for a process that the signal killed.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1
        self._write_fd = -1

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._received is not None

    @property
    def signal_name(self) -> str | None:
        """Such as SIGTERM; None when none has come."""
        return None if self._received is None else signal.Signals(self._received).name

    def __enter__(self) -> StopRequest:
        read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        threading.Thread(target=_end_at_second, args=(read_fd,), daemon=True, name="signals").start()
        self._previous = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._write_fd)  # ends the thread

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._received = number
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_DFL)


def _end_at_second(read_fd: int) -> None:
    """Read the number of every signal as it comes."""
    num_received = 0
    while received := os.read(read_fd, 1):
        if received[0] in STOP_SIGNALS:
            num_received += 1
            if num_received == 2:
                os._exit(128 + received[0])
    os.close(read_fd)


# A forked worker would report its own signals to the listener of the training process.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
