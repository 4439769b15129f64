"""Draws the two figures of docs/concepts.md from their formulas: `python docs/images/draw.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

INK, SOFTMAX, LINEAR, PAPER = "#1f2933", "#c2571a", "#1f6f8b", "#ffffff"


def svg(width: int, height: int, title: str, body: Sequence[str]) -> str:
    """A picture on white, so that it can be read in dark mode too."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
    head += f'font-family="sans-serif" font-size="14" fill="{INK}">'
    paper = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
    return "\n".join([head, f"<title>{title}</title>", paper, *body, "</svg>"]) + "\n"


def box(x: float, y: float, width: float, height: float, colour: str, name: str, size: str) -> list[str]:
    """A matrix: a rectangle in proportion, its name inside, its size below."""
    middle = x + width / 2
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return [
        f'<rect {place} fill="{colour}" fill-opacity="0.25" stroke="{colour}"/>',
        text(middle, y + height / 2 + 5, name),
        text(middle, y + height + 18, size),
    ]


def text(x: float, y: float, content: str, anchor: str = "middle") -> str:
    """One line of text."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{content}</text>'


def draw_order() -> str:
    """Softmax: (q k^T) v, through N x N. Linear: q (k^T v), through D x D."""
    n, d = 130, 40
    softmax = [
        text(20, 30, "softmax: (q k^T) v", "start"),
        *box(20, 50, d, n, SOFTMAX, "q", "N x D"),
        text(72, 120, "x"),
        *box(84, 95, n, d, SOFTMAX, "k^T", "D x N"),
        text(232, 120, "="),
        *box(250, 50, n, n, SOFTMAX, "weights", "N x N"),
        text(396, 120, "x"),
        *box(412, 50, d, n, SOFTMAX, "v", "N x D"),
    ]
    linear = [
        text(20, 250, "linear: q (k^T v)", "start"),
        *box(20, 315, n, d, LINEAR, "k^T", "D x N"),
        text(165, 340, "x"),
        *box(180, 270, d, n, LINEAR, "v", "N x D"),
        text(235, 340, "="),
        *box(250, 315, d, d, LINEAR, "S", "D x D"),
        *box(332, 270, d, n, LINEAR, "q", "N x D"),
        text(396, 340, "x S ="),
        *box(420, 270, d, n, LINEAR, "o", "N x D"),
    ]
    return svg(480, 430, "The order of the products", [*softmax, *linear])


def attention_share(pixels: int, width: int = 768, patch: int = 16) -> float:
    """N / (N + 6 d): softmax attention's part of a block's multiplications, class token included."""
    tokens = (pixels // patch) ** 2 + 1
    return tokens / (tokens + 6 * width)


def draw_share() -> str:
    """Bars of `attention_share` of ViT-B/16 over the image size."""
    body = [text(20, 28, "softmax attention's share of a ViT-B/16 block's multiplications", "start")]
    for row, pixels in enumerate((224, 448, 896, 1792)):
        y, share = 50 + 36 * row, attention_share(pixels)
        body += [
            text(90, y + 17, f"{pixels} px", "end"),
            f'<rect x="100" y="{y}" width="320" height="24" fill="{LINEAR}" fill-opacity="0.15"/>',
            f'<rect x="100" y="{y}" width="{320 * share:.1f}" height="24" fill="{SOFTMAX}"/>',
            text(430, y + 17, f"{share:.0%}", "start"),
        ]
    return svg(480, 205, "Share of attention over image size", body)


FIGURES = {"order.svg": draw_order, "share.svg": draw_share}


def main(folder: Path) -> None:
    """Write all figures."""
    for name, draw in FIGURES.items():
        (folder / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
