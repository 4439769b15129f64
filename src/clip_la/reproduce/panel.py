"""A panel: one of the paper's figures, made again, with all that is needed to judge it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_la.reproduce.verdicts import Claim


@dataclass(frozen=True)
class Table:
    """Plain text, row by row."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Panel:
    """What a panel shows.

    Attributes:
        name: as in --panels; of its folder too.
        facts: on what data, sizes, budget and seeds it rests.
        claims: the paper's, beside what was found.
        figures: caption -> the figure's SVG file; a PNG lies beside it.
        limits: what it can't show.
        numbers: everything, for JSON.
    """

    name: str
    title: str
    facts: Mapping[str, str]
    claims: Sequence[Claim]
    figures: Mapping[str, Path]
    tables: Sequence[Table]
    limits: Sequence[str]
    numbers: Mapping[str, Any]
