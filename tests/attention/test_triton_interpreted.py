"""Runs the tests of the Triton kernels in Triton's interpreter, in a process that imports Triton for that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

KERNEL_TESTS = Path(__file__).with_name("test_triton_kernels.py")


def _run(*selection: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(KERNEL_TESTS), "-rfE"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([*command, *selection], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    assert re.search(r"\d+ passed", run.stdout), run.stdout[-2_000:]


def test_kernels() -> None:
    _run("-m", "not gpu and not slow")


@pytest.mark.slow
def test_kernels_at_length() -> None:
    _run("-m", "not gpu and slow")
