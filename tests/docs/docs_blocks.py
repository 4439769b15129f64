"""The fenced blocks of a Markdown page, and the commands in those of a shell.

A comment in the line before a fence says what is special about the block:

    <!-- not run: REASON -->   its commands are held against the real parsers only; REASON is in docs_commands
    <!-- file: NAME -->        it is the content of a file that later blocks of the page use
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]
PAGES = [REPO_ROOT / "README.md", *sorted((REPO_ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(
    r"^(?:<!-- (?P<marker>[^\n]*?) -->\n+)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, its language, its text, and the marker before it."""

    page: Path
    line: int
    language: str
    text: str
    marker: str

    @property
    def why_not_run(self) -> str | None:
        """The reason in `not run: REASON`."""
        return self._after("not run: ")

    @property
    def file_name(self) -> str | None:
        """The name in `file: NAME`."""
        return self._after("file: ")

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPO_ROOT)}:{self.line}"

    def _after(self, start: str) -> str | None:
        return self.marker.removeprefix(start) if self.marker.startswith(start) else None


def blocks_of(page: Path) -> list[Block]:
    """All of a page, from top to bottom."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            found["language"],
            found["text"],
            found["marker"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of each command of a bash block; comments are left out, `\\` at a line's end joins lines."""
    for line in block.text.replace("\\\n", " ").splitlines():
        for words in _split_and(shlex.split(line, comments=True)):
            if words:
                yield words


def _split_and(words: list[str]) -> Iterator[list[str]]:
    while "&&" in words:
        place = words.index("&&")
        yield words[:place]
        words = words[place + 1 :]
    yield words
