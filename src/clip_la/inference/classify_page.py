"""A classification as one HTML page that needs no other file: a card a picture, fine on a phone."""

from __future__ import annotations

from html import escape

from clip_la.inference.classification import Classification, Prediction
from clip_la.page import document

_LABELS_SHOWN = 5
_LABELS_OPEN = 10


def page(result: Classification) -> str:
    """The whole page, with a card for each picture that has a thumbnail."""
    shown = [prediction for prediction in result.readable if prediction.thumbnail]
    title = f"{len(result.readable)} pictures, {len(result.labels)} labels"
    sections = [
        f"<h1>{escape(title)}</h1>",
        f"<p class='fine'>{escape(_explanation(result, len(shown)))}</p>",
        _counts(result),
        "<h2>Pictures</h2><ul class='pictures'>" + "".join(_card(result, item) for item in shown) + "</ul>",
        _unreadable(result),
    ]
    return document(title, sections, style=("clip_la.inference", "classify.css"))


def _explanation(result: Classification, num_shown: int) -> str:
    sum_of = (
        "The probabilities of a picture add up to 100 % over the labels given: one of them is always the "
        "most probable, even where none is right."
        if result.exclusive
        else "Each label is judged by itself, so probabilities need not add up to 100 %."
    )
    left_out = len(result.readable) - num_shown
    rest = f" {left_out} more pictures are not shown here." if left_out else ""
    return (
        f"Model {result.model} (attention {result.attention}), templates {result.templates}. {sum_of}{rest}"
    )


def _counts(result: Classification) -> str:
    items = "".join(
        _bar(label, f"{count}", count / len(result.readable))
        for label, count in result.counts().most_common()
    )
    if not items:
        return ""
    is_open = " open" if len(result.counts()) <= _LABELS_OPEN else ""
    return (
        f"<details{is_open}><summary>Most probable labels</summary><ol class='labels'>{items}</ol></details>"
    )


def _card(result: Classification, prediction: Prediction) -> str:
    ranked = prediction.top(result.labels, _LABELS_SHOWN)
    bars = "".join(_bar(label, f"{100 * value:.1f} %", value) for label, value in ranked)
    best, value = ranked[0]
    alt = escape(f"{prediction.path}: most probably {best}, {100 * value:.1f} %", quote=True)
    return (
        f'<li><img src="data:image/jpeg;base64,{prediction.thumbnail}" alt="{alt}">'
        f"<h3>{escape(prediction.path)}</h3><ol class='labels'>{bars}</ol></li>"
    )


def _bar(label: str, value: str, share: float) -> str:
    return (
        f"<li style='--share:{100 * share:.1f}%'><span>{escape(label)}</span> "
        f"<span>{escape(value)}</span></li>"
    )


def _unreadable(result: Classification) -> str:
    items = "".join(f"<li>{escape(f'{item.path}: {item.error}')}</li>" for item in result.unreadable)
    if not items:
        return ""
    return f"<h2>{len(result.unreadable)} not readable</h2><ul class='unreadable'>{items}</ul>"
