"""The frame of a page that needs no other file and no network: head, style and sections."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib import resources


def document(title: str, sections: Iterable[str], *, style: tuple[str, str]) -> str:
    """A whole HTML page.

    Args:
        title: plain text.
        sections: HTML, one below the other; empty ones are left out.
        style: (package, file) of the style sheet that follows the common one.
    """
    sheets = (("clip_la", "page.css"), style)
    styles = "".join(resources.files(package).joinpath(name).read_text("utf-8") for package, name in sheets)
    return (
        "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f"<title>{escape(title)}</title>\n<style>\n{styles}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, sections))
        + "\n</main>\n</body>\n</html>\n"
    )
