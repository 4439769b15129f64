"""docs/field_reports.md: every report has a row, and every test that a row names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROWS = [
    line.strip("| \n").split(" | ")
    for line in (ROOT / "docs" / "field_reports.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| \d+ \|", line)
]


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_report_has_one_row() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 34))
    assert {len(row) for row in ROWS} == {5}


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_named_tests_exist(row: list[str]) -> None:
    named = row[-1].split()
    assert named
    for name in named:
        match = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", name)
        assert match, f"{name} doesn't name a test"
        assert match[2] in functions_of(match[1]), f"{match[1]} has no {match[2]}"
