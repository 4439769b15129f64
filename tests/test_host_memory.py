"""Freed memory is kept: no page of it has to come from the system again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource
import torch
from clip_la.host_memory import keep_freed_memory
assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):  # until what lies between large blocks has found its place
    torch.ones(2**24)
before = faults()
for _ in range(4):
    torch.ones(2**24)
assert faults() - before < 1000, faults() - before
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_memory_is_reused() -> None:
    """Four times 64 MiB would be 65,536 pages of 4 KiB."""
    subprocess.run([sys.executable, "-c", COUNT_FAULTS], check=True, timeout=120)
