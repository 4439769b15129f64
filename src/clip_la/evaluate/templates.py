"""Prompt templates: named sets, or a file with one template a line.

`{}` stands for the class name, or `{c}`, as in CLIP_benchmark's files.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import open_clip

from clip_la.evaluate.classes import read_text

_NAMED_SETS: dict[str, tuple[str, ...]] = {
    "openai-80": tuple(template("{}") for template in open_clip.OPENAI_IMAGENET_TEMPLATES),
    "simple-7": tuple(template("{}") for template in open_clip.SIMPLE_IMAGENET_TEMPLATES),
    "photo": ("a photo of a {}.",),
    "plain": ("{}",),
}
TEMPLATE_SETS: tuple[str, ...] = tuple(_NAMED_SETS)


@dataclass(frozen=True)
class Templates:
    """A set of prompt templates.

    Attributes:
        name: of the set, or the path of the file.
        texts: each with exactly one `{}`.
    """

    name: str
    texts: tuple[str, ...]

    @property
    def hash(self) -> str:
        """Twelve hex digits of the SHA-256 of the templates in their order."""
        return hashlib.sha256("\n".join(self.texts).encode()).hexdigest()[:12]

    def prompts(self, name: str) -> list[str]:
        """Every template with the class name put in."""
        return [text.replace("{}", name) for text in self.texts]


def load_templates(source: str | Path) -> Templates:
    """A named set (`TEMPLATE_SETS`) or the non-empty lines of a file.

    Raises:
        ValueError: neither a set nor a file, or a line without exactly one `{}`.
    """
    if str(source) in _NAMED_SETS:
        return Templates(str(source), _NAMED_SETS[str(source)])
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"templates: {source} is neither one of {', '.join(TEMPLATE_SETS)} nor a file")
    lines = [(number, line.strip()) for number, line in enumerate(read_text(path).splitlines(), start=1)]
    texts = [_checked(path, number, line) for number, line in lines if line]
    if not texts:
        raise ValueError(f"{path} has no template; expected one a line, such as: a photo of a {{}}.")
    return Templates(str(path), tuple(texts))


def _checked(path: Path, number: int, line: str) -> str:
    line = line.replace("{c}", "{}")
    if line.count("{}") != 1:
        raise ValueError(
            f"{path}, line {number}: expected exactly one {{}} for the class name; "
            f"found {line.count('{}')} in {line!r}"
        )
    return line
