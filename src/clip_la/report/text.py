"""How numbers and settings are written for people."""

from __future__ import annotations

import json
import math
from typing import Any

EMPTY = "-"


def number(value: float | None) -> str:
    """A loss: three decimals, "NaN" where it was not finite."""
    if value is None:
        return EMPTY
    return f"{value:.3f}" if math.isfinite(value) else "NaN"


def count(value: float | None) -> str:
    """A count with three digits and a unit: 12.3 M."""
    if value is None:
        return EMPTY
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f}"


def percent(fraction: float | None, decimals: int = 1) -> str:
    """A fraction as 61.2 %."""
    if fraction is None:
        return EMPTY
    return f"{100 * fraction:.{decimals}f} %" if math.isfinite(fraction) else "NaN"


def duration(seconds: float) -> str:
    """5 min, 3 h, 12 days."""
    for unit, length in (("days", 86400.0), ("h", 3600.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def memory(value: float | None) -> str:
    """Bytes as 1.23 GiB."""
    return EMPTY if value is None or not math.isfinite(value) else f"{value / 2**30:.2f} GiB"


def hours(value: float) -> str:
    """A time: 1.25 h, or minutes and seconds below an hour."""
    return f"{value:.2f} h" if value >= 1 else f"{60 * value:.1f} min"


def setting(value: Any) -> str:
    """A config value or an exact count: text as it is, 400 000 000, true, null, [1, 2]."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}".replace(",", " ")
    return json.dumps(value, default=str)


def evaluation(name: str) -> str:
    """An evaluation's name without its kind: zeroshot/imagenet -> imagenet."""
    return name.split("/", 1)[-1]
