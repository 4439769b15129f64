"""Seconds and bytes that calls take: repeats in turn, and the peak of memory above what was there before."""

from __future__ import annotations

import ctypes
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Seconds of repeated calls: the median and the quartiles."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, seconds: list[float]) -> Times:
        """From single measurements; one alone is its own quartiles."""
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0], 1)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high, len(seconds))


def time_calls(calls: Mapping[str, Call], device: torch.device, *, budget: float) -> dict[str, Times]:
    """All calls in turn, again and again: what else the machine does meets all of them alike.

    Args:
        budget: seconds for all of it; at least one round is timed after one to warm up.
    """
    for call in calls.values():
        _seconds(call, device)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + budget
    while True:
        for name, call in calls.items():
            seconds[name].append(_seconds(call, device))
        if time.perf_counter() >= end:
            return {name: Times.of(values) for name, values in seconds.items()}


def peak_memory(call: Call, device: torch.device) -> int | None:
    """Bytes above those in use before; None where the system doesn't tell (the CPU outside Linux).

    On the CPU it is the peak of the process's resident memory, so that memory of compiled code counts too.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not Path("/proc/self/clear_refs").exists():
        return None
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that was kept would hide what the call takes
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts again from here
    before = _resident("VmRSS")
    call()
    return max(_resident("VmHWM") - before, 0)


def available_memory(device: torch.device) -> int | None:
    """Bytes that can still be had; None where the system doesn't tell (the CPU outside Linux)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.M) if meminfo.exists() else None
    return int(found[1]) * 1024 if found else None


def _seconds(call: Call, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024
