"""The report as one HTML page that needs no network: findings, tables, and figures drawn in place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from xml.sax.saxutils import quoteattr

from matplotlib.figure import Figure

from clip_la.page import document
from clip_la.report.axes import XAxis
from clip_la.report.compare import Comparison
from clip_la.report.drawing import GRID, INK, svg_text
from clip_la.report.findings import Finding
from clip_la.report.runs import Run
from clip_la.report.summary import WINDOW, RunSummary
from clip_la.report.tables import Row, accuracy, comparison_table, paired_rows
from clip_la.report.text import EMPTY, count, evaluation, hours, number, percent, setting


@dataclass(frozen=True)
class Figures:
    """The figures of a page, one a panel.

    Attributes:
        by_axis: the page has a switch between them.
        machine, diagnostics: each under a heading of its own.
    """

    by_axis: Mapping[XAxis, Sequence[Figure]]
    machine: Sequence[Figure]
    diagnostics: Sequence[Figure]


def page(runs: Sequence[Run], comparison: Comparison, figures: Figures) -> str:
    """The whole page."""
    title = _title([run.name for run in runs])
    sections = [
        f"<h1>{escape(title)}</h1>",
        _findings(comparison.findings),
        "<h2>Results</h2>",
        _results(comparison),
        f"<p class='fine'>{escape(_explanation())}</p>",
        _paired(comparison),
        "<h2>Curves</h2>",
        _switch(figures.by_axis, comparison),
        _zeroshot(comparison.summaries),
        _evaluations(runs),
        _lost(comparison.summaries),
        _group("Machine", figures.machine, "As logged, over samples seen; rank 0's memory."),
        _group("Diagnostics", figures.diagnostics, _DIAGNOSTICS),
        _config(comparison),
        _sources(runs, comparison.summaries),
    ]
    return document(title, sections, style=("clip_la.report", "report.css"))


def _title(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"Run {names[0]}"
    return f"Comparison of {', '.join(names) if len(names) <= _MAX_NAMES else f'{len(names)} runs'}"


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return "<section class='findings'><p>Nothing found that speaks against these numbers.</p></section>"
    num_warnings = sum(finding.severity == "warning" for finding in findings)
    heading = (
        f"{num_warnings} warning{'s' if num_warnings != 1 else ''}: read before the numbers"
        if num_warnings
        else "No warning; to know"
    )
    items = "".join(
        f"<li class='{finding.severity}'><b>{escape(finding.topic)}.</b> {escape(finding.message)}</li>"
        for finding in findings
    )
    kind = "findings bad" if num_warnings else "findings"
    return f"<section class='{kind}'><h2>{heading}</h2><ul>{items}</ul></section>"


def _results(comparison: Comparison) -> str:
    """The table of runs; what the warnings say of a run stands beside its name."""
    table = comparison_table(comparison.summaries, wide=True)
    topics = {
        summary.name: dict.fromkeys(f.topic for f in comparison.warnings if summary.name in f.runs)
        for summary in comparison.summaries
    }
    badges = ["".join(f"<li>{escape(topic)}</li>" for topic in found) for found in topics.values()]
    lists = [f"<ul aria-label='warnings'>{items}</ul>" if items else "" for items in badges]
    return _table(table.headers, table.rows, table.bad, below=lists)


def _explanation() -> str:
    return (
        f"Training loss: mean over the last {percent(WINDOW, 0)} of the samples the run has seen. "
        "Loss of an evaluation: its last value. Top-1: last evaluation, with its 95 % interval. "
        "Samples/s: median over log intervals. Data wait: share of the time spent waiting for data. "
        "Peak memory: of rank 0. Training time: in which samples were seen, over all restarts."
    )


def _paired(comparison: Comparison) -> str:
    if len(comparison.kinds) < 2:
        return ""
    if not comparison.paired:
        return "<h2>Seed by seed</h2><p>No two kinds have a seed in common: nothing can be paired.</p>"
    numbers = {len(pair.seeds) for pair in comparison.paired}
    plain = "Only one seed is shared: no interval can be given, and a difference may be luck."
    if numbers != {1}:
        plain = (
            "The interval is Student's t over the seeds' differences, in which luck that both kinds share "
            "cancels. Where one seed is shared there is none, and the difference may be luck."
        )
    text = (
        "Runs that differ only in their seed are one kind. Each kind less the baseline "
        f"({comparison.paired[0].first}), seed by seed. {plain} Many rows: expect one in twenty to look "
        "different by chance."
    )
    headers, rows = paired_rows(comparison.paired)
    return f"<h2>Seed by seed</h2>{_table(headers, rows)}<p class='fine'>{escape(text)}</p>"


def _switch(by_axis: Mapping[XAxis, Sequence[Figure]], comparison: Comparison) -> str:
    """All axes' figures, one shown: radio buttons and CSS, no script."""
    buttons = "".join(
        f"<input type='radio' name='by' id='by-{axis.key}'{' checked' if i == 0 else ''}>"
        f"<label for='by-{axis.key}'>{escape(axis.label)}</label>"
        for i, axis in enumerate(by_axis)
    )
    panels = "".join(
        f"<div class='by by-{axis.key}'><p class='fine'>{escape(axis.meaning)}</p>"
        f"<div class='figures'>{_figures(figures, axis.label)}</div></div>"
        for axis, figures in by_axis.items()
    )
    return f"<div class='switch'>{buttons}{panels}</div>{_without_flops(comparison)}"


def _without_flops(comparison: Comparison) -> str:
    reasons = [
        f"{name}: {facts.why_no_flops}" for name, facts in comparison.facts.items() if facts.why_no_flops
    ]
    if not reasons:
        return ""
    text = "FLOPs are not known for " + "; ".join(reasons) + "."
    return f"<p class='fine'>{escape(text)}</p>"


def _group(heading: str, figures: Sequence[Figure], explanation: str) -> str:
    if not figures:
        return ""
    fine = f"<p class='fine'>{escape(explanation)}</p>"
    return f"<h2>{heading}</h2>{fine}<div class='figures'>{_figures(figures, heading)}</div>"


def _figures(figures: Sequence[Figure], place: str) -> str:
    return "".join(_figure(figure, place) for figure in figures)


def _figure(figure: Figure, place: str) -> str:
    """Text and grid take the page's colours, so the figure suits a light and a dark page."""
    title = figure.axes[0].get_title(loc="left")
    label = f"{title}, {place}"
    svg = svg_text(figure, label).replace(INK, "currentColor").replace(GRID, "var(--line)")
    svg = _with_unique_ids(svg[svg.index("<svg") :], re.sub(r"\W+", "-", label))
    return f"<figure>{svg.replace('<svg ', f'<svg role=img aria-label={quoteattr(label)} ', 1)}</figure>"


def _with_unique_ids(svg: str, prefix: str) -> str:
    """Names of glyphs and parts are the same in every figure; on one page each must stand once."""
    return re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)


def _zeroshot(summaries: Sequence[RunSummary]) -> str:
    rows = [
        [
            evaluation(result.name),
            summary.name,
            accuracy(result),
            percent(result.top5),
            percent(result.best_top1),
            percent(result.chance, 2),
            setting(result.samples),
            EMPTY if result.num_images is None else setting(result.num_images),
            result.classes or EMPTY,
            result.templates or EMPTY,
        ]
        for summary in summaries
        for result in summary.zeroshot
    ]
    if not rows:
        return "<p>No run has been evaluated zero-shot yet.</p>"
    headers = [
        "Set", "Run", "Top-1 [95 %]", "Top-5", "Best top-1", "Chance", "At samples", "Images", "Classes",
        "Templates",
    ]  # fmt: skip
    return "<h2>Zero-shot</h2>" + _table(headers, sorted(rows, key=lambda row: row[0]))


def _evaluations(runs: Sequence[Run]) -> str:
    """Every metric that is a number, of the last evaluation of each name."""
    values: dict[tuple[str, str], dict[str, str]] = {}
    for run in runs:
        for point in run.evals:  # in order of samples, so the last one stays
            for key, value in point.metrics.items():
                if isinstance(value, (int, float)) or value is None:
                    shown = "NaN" if value is None else f"{value:.5g}"
                    values.setdefault((point.name, key), {})[run.name] = shown
    if not values:
        return ""
    rows = [[*key, *(cells.get(run.name, EMPTY) for run in runs)] for key, cells in values.items()]
    headers = ["Evaluation", "Metric", *(run.name for run in runs)]
    return _details("Last evaluations, all metrics", _table(headers, rows))


def _lost(summaries: Sequence[RunSummary]) -> str:
    causes = list(dict.fromkeys(cause for summary in summaries for cause in summary.lost_by_cause))
    if not causes:
        return ""
    rows = [[cause, *(str(summary.lost_by_cause.get(cause, 0)) for summary in summaries)] for cause in causes]
    return "<h2>Lost samples by cause</h2>" + _table(
        ["Cause", *(summary.name for summary in summaries)], rows
    )


def _config(comparison: Comparison) -> str:
    names = [summary.name for summary in comparison.summaries]
    config = comparison.config
    differs = [[key, *(setting(values[name]) for name in names)] for key, values in config.differs.items()]
    equal = [[key, setting(value)] for key, value in config.equal.items()]
    parts = ["<h2>Configuration</h2>"]
    if len(names) > 1:
        parts.append(_table(["Differs", *names], differs) if differs else "<p>No setting differs.</p>")
    unknown = "".join(f"<li>{escape(sentence)}</li>" for sentence in config.unknown)
    parts.append(f"<p class='fine'>Can't be known from here:</p><ul class='fine'>{unknown}</ul>")
    heading = f"{len(equal)} settings {'are equal' if len(names) > 1 else ''}"
    parts.append(_details(heading, _table(["Setting", "Value"], equal)))
    return "".join(parts)


def _sources(runs: Sequence[Run], summaries: Sequence[RunSummary]) -> str:
    rows = [
        [
            run.name,
            str(run.path),
            hours(summary.hours),
            hours(summary.training_hours),
            hours(summary.undone_hours),
            str(summary.num_resumes),
            count(summary.global_batch_size),
            number(summary.epoch_loss),
        ]
        for run, summary in zip(runs, summaries, strict=True)
    ]
    headers = [
        "Run", "Folder", "Logged time", "Of it training", "Of that undone", "Resumes", "Global batch",
        "Loss of last epoch",
    ]  # fmt: skip
    return _details("Where this was read from", _table(headers, rows))


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary.strip())}</summary>{content}</details>"


def _table(
    headers: Row,
    rows: Sequence[Row],
    bad: Sequence[Sequence[bool]] | None = None,
    below: Sequence[str] = (),
) -> str:
    """A table whose rows become cards on a narrow screen: each cell carries its header.

    Args:
        headers: plain text.
        rows: plain text.
        bad: cells to be marked.
        below: HTML that follows in the first cell of each row.
    """
    marks = bad or [[False] * len(headers)] * len(rows)
    head = "".join(f"<th scope='col'>{escape(header)}</th>" for header in headers)
    lines = []
    for row, row_marks, more in zip(rows, marks, below or [""] * len(rows), strict=True):
        first, *others = zip(headers, row, row_marks, strict=True)
        lines.append(f"<tr>{_cell(*first, more)}{''.join(_cell(*cell) for cell in others)}</tr>")
    body = "".join(lines)
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(header: str, text: str, is_bad: bool, more: str = "") -> str:
    kind = " class='bad'" if is_bad else " class='text'" if len(text) > _LONG else ""
    shown = f"<div>{escape(text)}{more}</div>" if more else escape(text)
    return f"<td data-label='{escape(header)}'{kind}>{shown}</td>"


_LONG = 36
_MAX_NAMES = 4
_DIAGNOSTICS = (
    "Attention layer by layer, on the same few training pairs: bold as last measured, faint as first. "
    "A query-dependent part near 0 or an effective rank near 1 means that all tokens attend alike "
    "(over-smoothing). Gradient norms are before clipping."
)
