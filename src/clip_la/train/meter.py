"""What one step did, and means over a log interval."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class StepResult:
    """What one step did, the same on every rank but for the towers' norms.

    Attributes:
        grad_norm: of all gradients, before clipping.
        tower_grad_norms: the same of each tower, by the name that it is logged under; empty on ranks
            without diagnostics.
    """

    loss: float
    grad_norm: float
    lr: float
    logit_scale: float
    finite: bool
    stop: bool
    tower_grad_norms: Mapping[str, float] = field(default_factory=dict)


class Meter:
    """Means over a log interval."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._losses: list[float] = []
        self._samples = 0
        self._data_seconds = 0.0
        self._started = self._waiting_since = time.time()
        self._last: StepResult | None = None

    def data_ready(self) -> None:
        """The batches of a step have come."""
        self._data_seconds += time.time() - self._waiting_since

    def step_done(self) -> None:
        """Everything else has been done; from here on the loop waits for data."""
        self._waiting_since = time.time()

    def add(self, result: StepResult, samples: int) -> None:
        """Count one step."""
        self._losses.append(result.loss)
        self._samples += samples
        self._last = result

    def take(self) -> dict[str, float]:
        """The interval's figures; the next interval begins."""
        assert self._last is not None
        seconds = max(1e-9, time.time() - self._started)
        figures = {
            "loss": sum(self._losses) / len(self._losses),
            "lr": self._last.lr,
            "logit_scale": self._last.logit_scale,
            "grad_norm": self._last.grad_norm,
            **self._last.tower_grad_norms,
            "samples_per_second": self._samples / seconds,
            "data_wait": min(1.0, self._data_seconds / seconds),
        }
        self._restart()
        return figures


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this rank has held so far: tensors on a GPU; on a CPU the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
