"""The report as one HTML page that needs no network: tables, findings and figures drawn in place."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

from matplotlib.figure import Figure

from clip_la.report.compare import Comparison, Finding
from clip_la.report.curves import GRID, INK, svg_text
from clip_la.report.runs import Run
from clip_la.report.summary import WINDOW, RunSummary
from clip_la.report.tables import Row, comparison_table
from clip_la.report.text import EMPTY, count, number, percent, setting


def page(runs: Sequence[Run], comparison: Comparison, figures: dict[str, Figure]) -> str:
    """The whole page. `figures`: caption -> figure, shown in this order."""
    title = "Comparison of " + ", ".join(run.name for run in runs) if len(runs) > 1 else f"Run {runs[0].name}"
    style = resources.files("clip_la.report").joinpath("report.css").read_text(encoding="utf-8")
    sections = [
        f"<h1>{escape(title)}</h1>",
        _findings(comparison.findings),
        "<h2>Results</h2>",
        _results(comparison.summaries),
        f"<p class='fine'>{escape(_explanation())}</p>",
        "<div class='figures'>"
        + "".join(_figure(caption, drawn) for caption, drawn in figures.items())
        + "</div>",
        "" if "Zero-shot" in figures else "<p>No run has been evaluated zero-shot yet.</p>",
        _evaluations(runs),
        _lost(comparison.summaries),
        _config(comparison),
        _sources(runs, comparison.summaries),
    ]
    return (
        "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, sections))
        + "\n</main>\n</body>\n</html>\n"
    )


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return "<section class='findings'><p>Nothing found that speaks against these numbers.</p></section>"
    num_warnings = sum(finding.severity == "warning" for finding in findings)
    heading = (
        f"<h2>{num_warnings} warning{'s' if num_warnings != 1 else ''}</h2>"
        if num_warnings
        else "<h2>Notes</h2>"
    )
    items = "".join(
        f"<li class='{finding.severity}'><b>{finding.severity}</b> {escape(finding.message)}</li>"
        for finding in findings
    )
    kind = "findings bad" if num_warnings else "findings"
    return f"<section class='{kind}'>{heading}<ul>{items}</ul></section>"


def _results(summaries: Sequence[RunSummary]) -> str:
    table = comparison_table(summaries, wide=True)
    return _table(table.headers, table.rows)


def _explanation() -> str:
    return (
        f"Training loss: mean over the last {percent(WINDOW, 0)} of the samples the run has seen. "
        "Loss of an evaluation: its last value. Top-1: last evaluation, with its 95 % interval. "
        "Samples/s: median over log intervals. Data wait: share of the time spent waiting for data."
    )


def _figure(caption: str, figure: Figure) -> str:
    """Text and grid take the page's colours, so the figure suits a light and a dark page."""
    svg = svg_text(figure, caption).replace(INK, "currentColor").replace(GRID, "var(--grid)")
    svg = svg[svg.index("<svg") :].replace("<svg ", f"<svg role='img' aria-label='{escape(caption)}' ", 1)
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>"


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
    differs = [
        [key, *(setting(values[name]) for name in names)] for key, values in comparison.config.differs.items()
    ]
    equal = [[key, setting(value)] for key, value in comparison.config.equal.items()]
    parts = ["<h2>Configuration</h2>"]
    if len(names) > 1:
        parts.append(_table(["Differs", *names], differs) if differs else "<p>No setting differs.</p>")
        parts.append(
            "<p class='fine'>Can't be known from here: whether equal paths held equal files, "
            "and whether the code was changed without a new version.</p>"
        )
    parts.append(
        _details(
            f"{len(equal)} settings {'are equal' if len(names) > 1 else ''}",
            _table(["Setting", "Value"], equal),
        )
    )
    return "".join(parts)


def _sources(runs: Sequence[Run], summaries: Sequence[RunSummary]) -> str:
    rows = [
        [
            run.name,
            str(run.path),
            f"{summary.hours:.2f} h",
            str(summary.num_resumes),
            count(summary.global_batch_size),
            number(summary.epoch_loss),
        ]
        for run, summary in zip(runs, summaries, strict=True)
    ]
    headers = ["Run", "Folder", "Logged time", "Resumes", "Global batch", "Loss of last epoch"]
    return _details("Where this was read from", _table(headers, rows))


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary.strip())}</summary>{content}</details>"


def _table(headers: Row, rows: Sequence[Row]) -> str:
    """A table whose rows become cards on a narrow screen: each cell carries its header."""
    head = "".join(f"<th scope='col'>{escape(header)}</th>" for header in headers)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td data-label='{escape(header)}'>{escape(cell)}</td>"
            for header, cell in zip(headers, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
