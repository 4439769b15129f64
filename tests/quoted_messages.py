"""Messages that documentation quotes, held against the sources: what is constant in them must be there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parent.parent


@cache
def sources() -> str:
    """All of src/ and slurm/, with adjacent string literals joined and every expansion a `…`."""
    python = "\n".join(file.read_text() for file in sorted((REPO_ROOT / "src").rglob("*.py")))
    python = re.sub(r"\{[^{}\n]*\}", "…", re.sub(r'" *\n *f?"', "", python))
    shell = "\n".join(file.read_text() for file in sorted((REPO_ROOT / "slurm").iterdir()))
    return python + re.sub(r"\$\{[^{}]*\}|\$\w+|\$[*@]", "…", re.sub(r'" *\\\n *"', " ", shell))


def fragments(message: str) -> list[str]:
    """What of a quoted message is constant: N, M, HOST, x, y and … stand for what varies."""
    parts = re.split(r"…|\b[NMxy]\b|\bHOST\b", message)
    return [part.strip(" ;,-") for part in parts if len(part.strip(" ;,-")) > 2]


def is_in(message: str, text: str) -> bool:
    """Whether all that is constant in the message is in the text."""
    found = fragments(message)
    assert found, message
    return all(part in text for part in found)
