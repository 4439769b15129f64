"""A comparison as rows and columns: text, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from clip_la.report.compare import Comparison
from clip_la.report.differences import odd_ones
from clip_la.report.findings import HIGH_DATA_WAIT, Finding
from clip_la.report.kinds import PairedDifference
from clip_la.report.summary import RunSummary, Validation, ZeroShot, nan_to_none
from clip_la.report.text import EMPTY, count, evaluation, hours, memory, number, percent, setting

Row = Sequence[str]


@dataclass(frozen=True)
class Column:
    """A column of the table: its header, its cell for a run, and where it is shown.

    A terminal and a README have room for the columns that are not `wide`; whatever is wrong in the
    others is among the findings. A cell that `is_bad` is shown so on the page.
    """

    header: str
    cell: Callable[[RunSummary], str]
    numeric: bool = True
    wide: bool = False
    is_bad: Callable[[RunSummary], bool] = lambda summary: False


@dataclass(frozen=True)
class Table:
    """A table as text: one row a run; `bad` marks cells, in the same places."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    bad: tuple[tuple[bool, ...], ...]

    @property
    def headers(self) -> list[str]:
        """The columns' names, for people."""
        return [column.header for column in self.columns]


def comparison_table(summaries: Sequence[RunSummary], wide: bool) -> Table:
    """The table people read, all of it if `wide`; columns that no run can fill are left out."""
    odd_batches = odd_ones({summary.name: summary.global_batch_size for summary in summaries})
    columns = [
        Column("Run", lambda s: s.name, numeric=False),
        Column("Attention", lambda s: s.attention, numeric=False),
        Column("State", lambda s: s.state, numeric=False, is_bad=lambda s: s.state != "finished"),
        Column("Parameters", lambda s: count(s.num_parameters)),
        Column(
            "Batch", lambda s: _exact(s.global_batch_size), wide=True, is_bad=lambda s: s.name in odd_batches
        ),
        Column("Seed", lambda s: EMPTY if s.seed is None else str(s.seed), wide=True),
        Column("Samples seen", _samples_cell, is_bad=lambda s: s.samples < (s.samples_total or 0)),
        Column("Training loss", lambda s: number(s.train_loss), is_bad=lambda s: math.isnan(s.train_loss)),
        *[_validation_column(name) for name in _names(s.validation for s in summaries)],
        *[column for name in _names(s.zeroshot for s in summaries) for column in _zeroshot_columns(name)],
        Column("Samples/s", _speed_cell),
        Column("Data wait", _wait_cell, wide=True, is_bad=lambda s: s.data_wait > HIGH_DATA_WAIT),
        Column("Peak memory", lambda s: memory(s.peak_memory_bytes), wide=True),
        Column("Training time", lambda s: hours(s.training_hours), wide=True),
        Column(
            "Skipped steps", lambda s: str(s.skipped_steps), wide=True, is_bad=lambda s: s.skipped_steps > 0
        ),
        Column("Lost samples", lambda s: str(s.lost_samples), wide=True, is_bad=lambda s: s.lost_samples > 0),
        Column("Model", lambda s: s.model, numeric=False, wide=True),
    ]
    shown = [column for column in columns if wide or not column.wide]
    filled = tuple(column for column in shown if any(column.cell(s) != EMPTY for s in summaries))
    return Table(
        filled,
        tuple([column.cell(s) for column in filled] for s in summaries),
        tuple(tuple(column.is_bad(s) for column in filled) for s in summaries),
    )


def text_table(headers: Row, rows: Sequence[Row]) -> str:
    """Columns aligned with spaces, for a terminal."""
    widths = [max(map(len, cells)) for cells in zip(headers, *rows, strict=True)]
    lines = [headers, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def paired_rows(paired: Sequence[PairedDifference]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of the differences between kinds, at least one; the baseline heads its column."""
    headers = [
        "Metric",
        "Kind",
        "Mean",
        paired[0].first,
        "Difference [95 %]",
        "Each seed",
        "Seeds say",
    ]
    return headers, [_paired_row(pair) for pair in paired]


def _paired_row(pair: PairedDifference) -> list[str]:
    shown = f"{pair.mean:+.4f}"
    if pair.interval is not None:
        shown += f" [{pair.interval[0]:+.4f}, {pair.interval[1]:+.4f}]"
    each = ", ".join(
        f"{seed}: {difference:+.4f}" for seed, difference in zip(pair.seeds, pair.differences, strict=True)
    )
    first, second = f"{pair.first_mean:.4f}", f"{pair.second_mean:.4f}"
    return [pair.metric, pair.second, second, first, shown, each, pair.verdict]


def markdown(comparison: Comparison) -> str:
    """The table and the findings, ready for a README."""
    table = comparison_table(comparison.summaries, wide=False)
    rule = ["---:" if column.numeric else "---" for column in table.columns]
    lines = [
        "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |"
        for row in (table.headers, *table.rows)
    ]
    lines.insert(1, "| " + " | ".join(rule) + " |")
    return (
        "\n".join(lines)
        + "\n"
        + "".join(f"\n- {finding_text(finding)}" for finding in comparison.findings)
        + "\n"
    )


def finding_text(finding: Finding) -> str:
    """ "warning: The runs differ in ..." """
    return f"{finding.severity}: {finding.message}"


def csv_text(summaries: Sequence[RunSummary]) -> str:
    """One row a run with plain numbers; empty where there is none, `nan` where it was not finite."""
    rows = [_flat(summary) for summary in summaries]
    header = list(dict.fromkeys(key for row in rows for key in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def json_text(comparison: Comparison, diagnostics: Mapping[str, Any]) -> str:
    """Everything the report knows, for programs. NaN is null. `diagnostics`: of each run that has any."""
    content = {
        "runs": [
            {**asdict(summary), "model_facts": asdict(comparison.facts[summary.name])}
            for summary in comparison.summaries
        ],
        "config": asdict(comparison.config),
        "findings": [asdict(finding) for finding in comparison.findings],
        "kinds": [
            {"label": kind.label, "runs": list(map(list, kind.runs.items())), "repeats": kind.repeats}
            for kind in comparison.kinds
        ],
        "diagnostics": diagnostics,
        "paired_differences": [{**asdict(pair), "verdict": pair.verdict} for pair in comparison.paired],
    }
    return json.dumps(nan_to_none(content), indent=2, allow_nan=False, default=str) + "\n"


def accuracy(result: ZeroShot) -> str:
    """ "61.2 % [58.0, 64.3]": top-1 with its 95 % interval where the evaluation gave one."""
    interval = ""
    if result.top1_low is not None and result.top1_high is not None:
        interval = f" [{100 * result.top1_low:.1f}, {100 * result.top1_high:.1f}]"
    return percent(result.top1) + interval


def _samples_cell(summary: RunSummary) -> str:
    total = summary.samples_total
    if total is None or total == summary.samples:
        return count(summary.samples)
    return f"{count(summary.samples)} of {count(total)}"


def _exact(value: int | None) -> str:
    return EMPTY if value is None else setting(value)


def _speed_cell(summary: RunSummary) -> str:
    return EMPTY if math.isnan(summary.samples_per_second) else f"{summary.samples_per_second:.0f}"


def _wait_cell(summary: RunSummary) -> str:
    return EMPTY if math.isnan(summary.data_wait) else percent(summary.data_wait)


def _validation_column(name: str) -> Column:
    def cell(summary: RunSummary) -> str:
        """The newest loss, and the best where that is another."""
        found = next((value for value in summary.validation if value.name == name), None)
        if found is None:
            return EMPTY
        is_best = found.best == found.last or not math.isfinite(found.best)
        return number(found.last) + ("" if is_best else f" (best {number(found.best)})")

    return Column(f"Loss, {evaluation(name)}", cell)


def _zeroshot_columns(name: str) -> list[Column]:
    def find(summary: RunSummary) -> ZeroShot | None:
        """The result of this evaluation, if the run has it."""
        return next((value for value in summary.zeroshot if value.name == name), None)

    def top1(summary: RunSummary) -> str:
        """Accuracy with its interval."""
        found = find(summary)
        return EMPTY if found is None else accuracy(found)

    def chance(summary: RunSummary) -> str:
        """The accuracy of guessing."""
        found = find(summary)
        return EMPTY if found is None else percent(found.chance, 2)

    return [Column(f"Top-1, {evaluation(name)} [95 %]", top1), Column("Chance", chance)]


def _names(groups: Any) -> list[str]:
    return list(dict.fromkeys(value.name for group in groups for value in group))


def _flat(summary: RunSummary) -> dict[str, Any]:
    row = asdict(summary)
    for key in ("validation", "zeroshot", "lost_by_cause"):
        del row[key]
    for value in summary.validation:
        row |= _prefixed(value)
    for result in summary.zeroshot:
        row |= _prefixed(result)
    return row | {f"lost/{cause}": lost for cause, lost in summary.lost_by_cause.items()}


def _prefixed(value: Validation | ZeroShot) -> dict[str, Any]:
    fields = asdict(value)
    name = fields.pop("name")
    return {f"{name}/{key}": item for key, item in fields.items()}
