"""The first signal leaves a note, the second ends the process wherever it is; workers have their own."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from multiprocessing.synchronize import Event

import pytest

from clip_la.train.signals import StopRequest


def wait_in_python() -> None:
    while True:
        time.sleep(0.01)


def wait_in_c() -> None:
    """As in a collective that never returns: without the interpreter, deaf to Python's handlers."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def wait_for_signals(wait: str, is_ready: Event) -> None:
    with StopRequest():
        is_ready.set()
        globals()[wait]()


@pytest.mark.parametrize(("wait", "exit_code"), [("wait_in_python", -signal.SIGTERM), ("wait_in_c", 143)])
def test_the_second_signal_ends_the_process_at_once(wait: str, exit_code: int) -> None:
    context = multiprocessing.get_context("fork")
    is_ready = context.Event()
    process = context.Process(target=wait_for_signals, args=(wait, is_ready))
    process.start()
    assert is_ready.wait(60)
    time.sleep(0.3)  # until it waits
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(1)
    assert process.is_alive()
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == exit_code


def test_signals_of_a_forked_worker_are_its_own() -> None:
    with StopRequest() as stop:
        worker = multiprocessing.get_context("fork").Process(target=wait_in_python)
        worker.start()
        for _ in range(2):
            time.sleep(0.3)
            os.kill(worker.pid or 0, signal.SIGTERM)
        worker.join(60)
        assert worker.exitcode == -signal.SIGTERM
        assert not stop.requested


def test_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested
        assert stop.signal_name == "SIGUSR1"
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1
