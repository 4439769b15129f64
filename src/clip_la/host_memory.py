"""What happens to the host memory that torch frees."""

from __future__ import annotations

import ctypes

_MAX_MMAP_COUNT, _TRIM_THRESHOLD = -4, -1  # M_MMAP_MAX and M_TRIM_THRESHOLD in malloc.h
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed for the next allocation; False where the C library can't be asked.

    A training step on the CPU frees and allocates gigabytes. Left to itself, glibc gives large blocks back to
    the system, which maps them anew and fills them with zeros, page by page: a sixth of a step of ViT-B-16 at
    224 px. The price is that the process holds on to its peak. torch's tuning guide recommends other
    allocators for the same reason; one that was preloaded ignores this call.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_MAX_MMAP_COUNT, 0) and mallopt(_TRIM_THRESHOLD, _NEVER))
