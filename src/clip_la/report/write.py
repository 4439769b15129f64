"""Write a comparison of runs, for people (HTML, PNG, SVG, Markdown) and for programs (CSV, JSON)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clip_la.report import html
from clip_la.report.compare import Comparison, Finding, compare
from clip_la.report.curves import loss_figure, save, zeroshot_figure
from clip_la.report.layers import gradients_figure, layers_figure
from clip_la.report.runs import read_runs
from clip_la.report.tables import comparison_table, csv_text, finding_text, json_text, markdown, text_table

FILES = (
    "report.html",
    "comparison.csv",
    "comparison.json",
    "comparison.md",
    "curves.png",
    "curves.svg",
    "zeroshot.png",
    "zeroshot.svg",
)


@dataclass(frozen=True)
class ReportSummary:
    """What was written.

    Attributes:
        paths: the files, report.html first; those of zeroshot only if a run has been evaluated so.
        text: the table and the findings, to be printed.
        findings: what the reader must know before believing the comparison.
    """

    paths: tuple[Path, ...]
    text: str
    findings: tuple[Finding, ...]


def write_report(
    run_dirs: Sequence[Path], out: Path, *, log_axis: bool = False, now: float | None = None
) -> ReportSummary:
    """Compare runs and write the report into the folder `out`, over an earlier one.

    Args:
        run_dirs: run folders, each with config.yaml and metrics.jsonl.
        out: folder for the files of `FILES`; made if need be.
        log_axis: draw losses on a logarithmic axis.
        now: unix seconds that tell a running run from one that was killed; default: the clock.

    Raises:
        RunError: a folder is not a readable run.
    """
    runs = read_runs(run_dirs)
    comparison = compare(runs, now)
    figures = {"Loss": loss_figure(runs, log_axis)}
    zeroshot = zeroshot_figure(runs)
    if zeroshot is not None:
        figures["Zero-shot"] = zeroshot
    diagnostics = {
        "Attention by layer (faint: first measured)": layers_figure(runs),
        "Gradients": gradients_figure(runs),
    }
    figures |= {caption: figure for caption, figure in diagnostics.items() if figure is not None}
    texts = {
        "report.html": html.page(runs, comparison, figures),
        "comparison.csv": csv_text(comparison.summaries),
        "comparison.json": json_text(comparison),
        "comparison.md": markdown(comparison),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (out / name).unlink(missing_ok=True)  # an old zero-shot figure beside a new table would mislead
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    paths = [out / name for name in texts] + save(figures["Loss"], out / "curves")
    if zeroshot is not None:
        paths += save(zeroshot, out / "zeroshot")
    return ReportSummary(tuple(paths), _text(comparison), comparison.findings)


def _text(comparison: Comparison) -> str:
    table = comparison_table(comparison.summaries, wide=False)
    lines = [text_table(table.headers, table.rows)]
    if comparison.findings:
        lines += ["", *map(finding_text, comparison.findings)]
    return "\n".join(lines)
