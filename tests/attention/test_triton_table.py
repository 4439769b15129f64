"""Every kernel that the Triton backend launches, compiled for Hopper without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def _table(*options: str) -> str:
    """The command's output, in a process of its own: this one's Triton may be interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "clip_la.attention.triton_table", *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_kernels_fit_a_hopper_gpu() -> None:
    """bfloat16 and D = 64: no spills, within registers and shared memory, on tensor cores."""
    rows = [line for line in _table("--quick").splitlines() if "| bfloat16 | 64 |" in line]
    kernels = {row.split()[1] for row in rows}
    assert len(kernels) == 14
    assert all("wgmma" in row for row in rows if not row.startswith(("| exclusive", "| denominator")))


@pytest.mark.slow
def test_all_kernels_fit_a_hopper_gpu() -> None:
    assert "PREDICTED" in _table()
