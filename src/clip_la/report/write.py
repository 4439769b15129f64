"""Write a comparison of runs, for people (HTML, PNG, SVG, Markdown) and for programs (CSV, JSON)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from clip_la.report import html, series
from clip_la.report.axes import AXES, usable_axes
from clip_la.report.compare import Comparison, compare
from clip_la.report.curves import loss_figures, zeroshot_figures
from clip_la.report.drawing import save
from clip_la.report.findings import Finding
from clip_la.report.layers import gradients_figures, layers_figures
from clip_la.report.machine import machine_figures
from clip_la.report.runs import Run, read_usable_runs
from clip_la.report.tables import (
    comparison_table,
    csv_text,
    finding_text,
    json_text,
    markdown,
    paired_rows,
    text_table,
)

PAGE = "report.html"
DATA_FILES = (
    "comparison.csv",
    "comparison.json",
    "comparison.md",
    "training.csv",
    "evaluations.csv",
    "diagnostics.csv",
)
FIGURES = (
    *(stem + axis.file_ending for stem in ("curves", "zeroshot") for axis in AXES),
    "machine",
    "layers",
    "gradients",
)
FILES = (PAGE, *DATA_FILES, *(f"{stem}.{ending}" for stem in FIGURES for ending in ("png", "svg")))


@dataclass(frozen=True)
class ReportSummary:
    """What was written.

    Attributes:
        paths: the files, report.html first; of `FILES` those that the runs have something for.
        text: the table and the findings, to be printed.
        findings: what the reader must know before believing the comparison.
        comparison: all numbers.
    """

    paths: tuple[Path, ...]
    text: str
    findings: tuple[Finding, ...]
    comparison: Comparison


def write_report(
    run_dirs: Sequence[Path], out: Path, *, log_axis: bool = False, now: float | None = None
) -> ReportSummary:
    """Compare runs and write the report into the folder `out`, over an earlier one.

    A run that is empty or damaged is left out and named first among the warnings.

    Args:
        run_dirs: run folders, each with config.yaml and metrics.jsonl.
        out: folder for the files of `FILES`; made if need be.
        log_axis: draw losses on a logarithmic axis.
        now: unix seconds that tell a running run from one that was killed; default: the clock.

    Raises:
        RunError: a folder is no run, or no run can be read.
    """
    runs, left_out = read_usable_runs(run_dirs)
    comparison = compare(runs, now, left_out)
    texts = {
        PAGE: html.page(runs, comparison, _page_figures(runs, comparison, log_axis)),
        "comparison.csv": csv_text(comparison.summaries),
        "comparison.json": json_text(comparison, series.last_diagnostics(runs)),
        "comparison.md": markdown(comparison),
        "training.csv": series.training_csv(runs, comparison.facts),
        "evaluations.csv": series.evaluations_csv(runs, comparison.facts),
        "diagnostics.csv": series.diagnostics_csv(runs),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (out / name).unlink(missing_ok=True)  # an old figure beside a new table would mislead
    written = {name: text for name, text in texts.items() if text.strip()}
    for name, text in written.items():
        (out / name).write_text(text, encoding="utf-8")
    paths = [out / name for name in written]
    for stem, figure in _stacked_figures(runs, comparison, log_axis).items():
        paths += save(figure, out / stem)
    return ReportSummary(tuple(paths), _text(comparison), comparison.findings, comparison)


def _page_figures(runs: Sequence[Run], comparison: Comparison, log_axis: bool) -> html.Figures:
    facts = comparison.facts
    by_axis = {
        axis: [
            *loss_figures(runs, facts, axis, log_axis=log_axis, stacked=False),
            *zeroshot_figures(runs, facts, axis, stacked=False),
        ]
        for axis in usable_axes(runs, facts)
    }
    diagnostics = [*layers_figures(runs, stacked=False), *gradients_figures(runs, stacked=False)]
    return html.Figures(by_axis, machine_figures(runs, stacked=False), diagnostics)


def _stacked_figures(runs: Sequence[Run], comparison: Comparison, log_axis: bool) -> dict[str, Figure]:
    """File name without its ending -> figure."""
    facts = comparison.facts
    figures = {}
    for axis in usable_axes(runs, facts):
        figures[f"curves{axis.file_ending}"] = loss_figures(runs, facts, axis, log_axis=log_axis)
        figures[f"zeroshot{axis.file_ending}"] = zeroshot_figures(runs, facts, axis)
    figures["machine"] = machine_figures(runs)
    figures["layers"] = layers_figures(runs)
    figures["gradients"] = gradients_figures(runs)
    return {stem: drawn[0] for stem, drawn in figures.items() if drawn}


def _text(comparison: Comparison) -> str:
    table = comparison_table(comparison.summaries, wide=False)
    lines = [text_table(table.headers, table.rows)]
    if comparison.paired:
        lines += ["", text_table(*paired_rows(comparison.paired))]
    if comparison.findings:
        lines += ["", *map(finding_text, comparison.findings)]
    return "\n".join(lines)
