"""README.md and docs/*.md as a reader would use them: every command runs, or parses and says why no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from docs_blocks import PAGES, REPO_ROOT, Block, blocks_of, commands_of
from docs_commands import NOT_RUN, check_command, run_command

from clip_la.config_sources import load_run_config

IDS = [str(page.relative_to(REPO_ROOT)) for page in PAGES]
LANGUAGES = {"bash", "python", "yaml", "text", "mermaid", "bibtex", "json"}
SMALLER_MODELS = {"ViT-B-16": "ViT-nano-8", "ViT-L-14": "ViT-nano-8"}
"""What stands for a model in the Python that is run."""


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_page_works(page: Path, place: Path) -> None:
    variables: dict[str, str] = {}
    names: dict[str, Any] = {"__name__": "docs"}
    left_out: set[str] = set()
    for block in blocks_of(page):
        if block.file_name is not None:
            (place / block.file_name).write_text(block.text)
        elif block.language == "bash":
            left_out |= _run_shell(block, variables)
        elif block.language == "python":
            _run_python(block, names)
        elif block.language == "yaml":
            (place / "block.yaml").write_text(block.text)
            load_run_config(place / "block.yaml", {})
    if left_out:
        pytest.skip(f"done, but for {', '.join(sorted(left_out))}: not installed")


def _run_shell(block: Block, variables: dict[str, str]) -> set[str]:
    """Run or check each command; what was left out for lack of an optional package."""
    left_out: set[str] = set()
    for words in commands_of(block):
        try:
            if block.why_not_run is not None:
                check_command(words, variables)
            else:
                left_out |= run_command(words, variables)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{block}: {' '.join(words)}: {error}") from error
    return left_out


def _run_python(block: Block, names: dict[str, Any]) -> None:
    text = block.text
    for large, small in SMALLER_MODELS.items():
        text = text.replace(large, small)
    code = compile("\n" * block.line + text, str(block.page), "exec")
    if block.why_not_run is None:
        exec(code, names)


def test_markers_and_languages_are_known() -> None:
    found = [block for page in PAGES for block in blocks_of(page)]
    assert {block.language for block in found} <= LANGUAGES, [b for b in found if b.language not in LANGUAGES]
    marked = [block for block in found if block.marker]
    assert [str(block) for block in marked if block.why_not_run is None and block.file_name is None] == []
    assert {block.why_not_run for block in marked} - {None} == set(NOT_RUN)
