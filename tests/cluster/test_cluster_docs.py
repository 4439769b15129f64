"""docs/cluster.md against the sources: the messages that it explains exist, with the exit codes it gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clip_la import exit_codes
from quoted_messages import is_in, sources

REPO_ROOT = Path(__file__).resolve().parents[2]
DOCS = (REPO_ROOT / "docs" / "cluster.md").read_text()
FOREIGN = {  # what the shell, Python, Slurm, the kernel, PyTorch and NCCL say
    "python: command not found", "No module named 'clip_la'", "torch.OutOfMemoryError", "Killed", "oom_kill",
    "Watchdog caught collective operation timeout", "NCCL error", "Connection closed by peer",
    "Requested node configuration is not available", "Failed to ensure --gpus", "DependencyNeverSatisfied",
    "Dependency",
}  # fmt: skip
SLURM_FLAGS = {
    "account", "partition", "nodes", "gpus-per-node", "gpus-per-task", "ntasks-per-node", "array", "time",
    "cpus-per-task", "mem", "signal", "requeue", "no-requeue", "batch", "dependency", "pty", "export",
    "gres", "gpus",
}  # fmt: skip
CODES = {value for name, value in vars(exit_codes).items() if name.startswith("EXIT_")}


SOURCES = sources()
DYING = re.findall(r'die (\d+) "([^\n]*)', SOURCES)


def rows() -> list[tuple[list[str], str]]:
    """(quoted messages, exit code) of each row of the table of errors."""
    table = DOCS.split("## When it fails")[1]
    cells = [line.split(" | ") for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    return [(re.findall(r"`([^`]+)`", cell[0]), cell[1].strip()) for cell in cells[1:]]


@pytest.mark.parametrize("message", [message for messages, _ in rows() for message in messages])
def test_message_is_one_that_the_sources_give(message: str) -> None:
    assert message in FOREIGN or is_in(message, SOURCES)


def test_exit_codes_are_those_of_the_sources() -> None:
    assert len(rows()) > 25
    for messages, code in rows():
        assert code == "-" or int(code) in CODES, messages
        dying = [given for given, line in DYING if any(is_in(message, line) for message in messages)]
        assert set(dying) <= {code}, messages


def test_every_way_that_a_batch_file_dies_is_explained() -> None:
    assert len(DYING) > 8
    for _, line in DYING:
        assert any(is_in(message, line) for messages, _ in rows() for message in messages), line


def test_flags_of_clip_la_that_it_names_exist() -> None:
    """Every one in a command or in the advice for an error; Slurm's own are in the list."""
    for flag in set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", DOCS)) - SLURM_FLAGS:
        assert f"--{flag}" in SOURCES or f"{flag.replace('-', '_')}:" in SOURCES, flag
