"""Rows as text for people and as CSV and JSON for programs."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from clip_la.bench.operators import CEILINGS
from clip_la.bench.sweep import Row

_BASELINES = {"operator": "softmax"}
_MEBIBYTE = 2**20


def write_rows(rows: Sequence[Row], about: Mapping[str, Any], folder: Path) -> list[Path]:
    """bench.csv and bench.json in `folder`; the latter also says on what machine and with what."""
    folder.mkdir(parents=True, exist_ok=True)
    table, document = folder / "bench.csv", folder / "bench.json"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(row.to_dict() for row in rows)
    content = {"about": dict(about), "rows": [row.to_dict() for row in rows]}
    document.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return [table, document]


def format_row(row: Row, rows: Sequence[Row]) -> str:
    """One line; beside the time, how many times faster than the baseline among `rows` on the same work."""
    spread = f"{row.seconds * 1e3:10.2f} ms  [{row.seconds_low * 1e3:.2f}, {row.seconds_high * 1e3:.2f}]"
    memory = "" if row.peak_bytes is None else f"  peak +{row.peak_bytes / _MEBIBYTE:.1f} MiB"
    share = "" if row.attention_share is None else f"  attention {row.attention_share:.0%}"
    ratio = speedup(row, rows)
    faster = "" if ratio is None else f"  {ratio:6.2f}x"
    where = f"{row.subject:14s} {row.passes:16s} {row.dtype:8s} B{row.batch_size} {row.size}"
    return f"{where:52s}{spread}{faster}{memory}{share}"


def speedup(row: Row, rows: Sequence[Row]) -> float | None:
    """The baseline's time over this row's: softmax, or the first model; None for those and for ceilings."""
    same = [other for other in rows if _work(other) == _work(row)]
    wanted = _BASELINES.get(row.level)
    baseline = next((other for other in same if wanted is None or other.subject == wanted), None)
    if baseline is None or baseline.subject == row.subject or row.subject in CEILINGS:
        return None
    return baseline.seconds / row.seconds


def _work(row: Row) -> tuple[Any, ...]:
    return row.level, row.passes, row.dtype, row.causal, row.batch_size, row.size
