"""docs/troubleshooting.md against the sources: its messages are given, the flags that it advises exist."""

from __future__ import annotations

import re

import pytest
from docs_blocks import REPO_ROOT

from clip_la import exit_codes
from quoted_messages import is_in, sources

TEXT = (REPO_ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
FOREIGN_FLAGS = {"nproc-per-node"}


def messages() -> list[str]:
    """What is quoted in the first column of the tables."""
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and "---" not in line]
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def test_there_are_many() -> None:
    assert len(messages()) > 40


@pytest.mark.parametrize("message", messages())
def test_message_is_one_that_the_sources_give(message: str) -> None:
    assert is_in(message, sources())


def test_flags_exist() -> None:
    flags = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", TEXT)) - FOREIGN_FLAGS
    for flag in flags:
        assert f"--{flag}" in sources() or f"{flag.replace('-', '_')}:" in sources(), flag


def test_exit_codes_exist() -> None:
    codes = {value for name, value in vars(exit_codes).items() if name.startswith("EXIT_")}
    assert {int(code) for code in re.findall(r"exit code (\d+)", TEXT)} <= codes
