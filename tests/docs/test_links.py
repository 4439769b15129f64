"""Links of README.md, CONTRIBUTING.md and docs/*.md: files and headings that they lead to exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs_blocks import PAGES, REPO_ROOT

ALL = [*PAGES, REPO_ROOT / "CONTRIBUTING.md"]


def links_of(page: Path) -> list[str]:
    """Targets of a page's links and images, those to the web left out."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    return [target for target in targets if "://" not in target]


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ALL, ids=[page.name for page in ALL])
def test_links_lead_somewhere(page: Path) -> None:
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors_of(target), f"{page.name} links to {link}"


def test_every_page_is_in_the_index() -> None:
    index = {link.partition("#")[0] for link in links_of(REPO_ROOT / "docs" / "README.md")}
    pages = {page.name for page in (REPO_ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= index, pages - index
