"""Panels as one page, as Markdown, as JSON, and as lines for a terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from clip_la.page import document
from clip_la.report.summary import nan_to_none
from clip_la.reproduce.panel import Panel, Table
from clip_la.reproduce.verdicts import Claim

TITLE = "Linear attention in CLIP: the paper's three figures, made again"
PAPER = "On The Application of Linear Attention in Multimodal Transformers, arXiv 2604.10064"


def write_panels(
    panels: Sequence[Panel], about: Mapping[str, Any], warning: str | None, out: Path
) -> list[Path]:
    """Write reproduction.html, .md and .json into `out`.

    Args:
        panels: in their order.
        about: how all of it was made, for people.
        warning: what a reader must know first; None where there is nothing.
        out: holds the panels' figures.
    """
    texts = {
        "reproduction.html": _page(panels, about, warning),
        "reproduction.md": markdown(panels, about, warning, out),
        "reproduction.json": _json(panels, about, warning, out),
    }
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    return [out / name for name in texts]


def text_of(panels: Sequence[Panel]) -> str:
    """Every claim with its verdict, for a terminal."""
    return "\n".join(
        line
        for panel in panels
        for line in ("", panel.title, *(line for claim in panel.claims for line in _claim_lines(claim)))
    )


def _claim_lines(claim: Claim) -> tuple[str, str]:
    return f"  {claim.verdict.upper():11s} {claim.paper}", f"{'':14s}{claim.found}"


def markdown(panels: Sequence[Panel], about: Mapping[str, Any], warning: str | None, out: Path) -> str:
    """The same as the page, with figures by their paths under `out`."""
    parts = [f"**{warning}**"] if warning else []
    parts.append("\n".join(f"- {key}: {value}" for key, value in about.items()))
    for panel in panels:
        parts += [f"## {panel.title}", *_markdown_panel(panel, out)]
    return "\n\n".join(parts) + "\n"


def _markdown_panel(panel: Panel, out: Path) -> Iterator[str]:
    rows = [[claim.paper, claim.found, f"**{claim.verdict}**"] for claim in panel.claims]
    yield _markdown_table(["The paper", "Found here", "Verdict"], rows)
    for caption, path in panel.figures.items():
        yield f"![{caption}]({path.with_suffix('.png').relative_to(out).as_posix()})"
    for table in panel.tables:
        yield f"{table.title}:"
        yield _markdown_table(table.headers, table.rows)
    yield "\n".join(f"- {key}: {value}" for key, value in panel.facts.items())
    yield "What this can't show:"
    yield "\n".join(f"- {limit}" for limit in panel.limits)


def _markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _json(panels: Sequence[Panel], about: Mapping[str, Any], warning: str | None, out: Path) -> str:
    content = {
        "paper": PAPER,
        "warning": warning,
        "about": dict(about),
        "panels": {
            panel.name: {
                "facts": dict(panel.facts),
                "claims": [asdict(claim) for claim in panel.claims],
                "figures": {key: path.relative_to(out).as_posix() for key, path in panel.figures.items()},
                "limits": list(panel.limits),
                "numbers": dict(panel.numbers),
            }
            for panel in panels
        },
    }
    return json.dumps(nan_to_none(content), indent=2) + "\n"


def _page(panels: Sequence[Panel], about: Mapping[str, Any], warning: str | None) -> str:
    sections = [
        f"<h1>{escape(TITLE)}</h1>",
        f"<p class='fine'>{escape(PAPER)}</p>",
        f"<p class='marked'>{escape(warning)}</p>" if warning else "",
        _facts(about),
        *(_section(panel) for panel in panels),
    ]
    return document(TITLE, sections, style=("clip_la.reproduce", "reproduce.css"))


def _section(panel: Panel) -> str:
    claims = "".join(
        f"<li class='{escape(claim.verdict, quote=True)}'><p>{escape(claim.paper)} "
        f"<span class='verdict'>{escape(claim.verdict)}</span></p><p>{escape(claim.found)}</p></li>"
        for claim in panel.claims
    )
    figures = "".join(_figure(caption, path) for caption, path in panel.figures.items())
    limits = "".join(f"<li>{escape(limit)}</li>" for limit in panel.limits)
    return (
        f"<section class='panel' id='{panel.name}'><h2>{escape(panel.title)}</h2>"
        f"<ul class='claims'>{claims}</ul>{figures}{''.join(map(_table, panel.tables))}{_facts(panel.facts)}"
        f"<p>What this can't show:</p><ul class='fine'>{limits}</ul></section>"
    )


def _figure(caption: str, path: Path) -> str:
    """The SVG itself, so that the page needs no other file."""
    svg = path.read_text(encoding="utf-8")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>"


def _facts(facts: Mapping[str, Any]) -> str:
    pairs = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items())
    return f"<dl class='facts'>{pairs}</dl>"


def _table(table: Table) -> str:
    head = "".join(f"<th scope='col'>{escape(header)}</th>" for header in table.headers)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    return (
        f"<div class='scroll'><table><caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )
