"""Time against length: softmax, Eq. 4 and Eq. 7 on this machine, by `clip-la bench`'s measurements."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from clip_la.bench.command import machine_facts
from clip_la.bench.plot import plot_times, slope_rows
from clip_la.bench.sweep import OperatorSweep, Row, fitted_slope, sweep_operators
from clip_la.bench.timing import available_memory
from clip_la.bench.write import format_row, write_rows
from clip_la.config import ConfigError
from clip_la.reproduce.budget import Budget
from clip_la.reproduce.panel import Panel, Table
from clip_la.reproduce.verdicts import Line, slope_claim, speedup_claim

_HEADS, _HEAD_SIZE = 2, 64
_BYTES_A_TOKEN = 8 * 3 * _HEADS * _HEAD_SIZE * 4  # q, k, v in float32, and what is computed from them
_BUSY = 1.5  # of a load of one a core, which measuring alone makes
_LABELS = {"softmax": "softmax", "eq4": "Eq. 4", "eq7": "Eq. 7"}


def time_panel(budget: Budget, folder: Path) -> Panel:
    """Measure, unless `folder` holds a measurement, and draw."""
    if not (folder / "bench.json").exists():
        _measure(budget, folder)
    return draw_time_panel(folder)


def draw_time_panel(folder: Path) -> Panel:
    """The panel of a folder that `clip-la bench` wrote, or `time_panel`."""
    content = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    about, rows = content["about"], [Row(**row) for row in content["rows"]]
    rows = [row for row in rows if row.level == "operator" and row.passes == "forward+backward"]
    rows = [row for row in rows if row.dtype == rows[0].dtype]
    lines = {name: _line(name, [row for row in rows if row.subject == name]) for name in _LABELS}
    figure = folder / "time.svg"
    plot_times(rows, f"{about['machine']}", [figure, figure.with_suffix(".png")])
    claims = [slope_claim(line, 2 if name == "softmax" else 1) for name, line in lines.items()]
    claims += [speedup_claim(lines["softmax"], lines[name]) for name in ("eq4", "eq7")]
    return Panel(
        name="time",
        title="Time against length",
        facts=_facts(rows, about),
        claims=claims,
        figures={"Seconds of one forward and backward pass, and the slopes": figure},
        tables=[_table(lines)],
        limits=list(_limits(about)),
        numbers={"about": about, "rows": [row.to_dict() for row in rows],
                 "slopes": {name: line.slope for name, line in lines.items()}},
    )  # fmt: skip


def _measure(budget: Budget, folder: Path) -> None:
    """All rows in one go, or none: times that are compared are taken in turn."""
    device = torch.device("cpu")
    free = available_memory(device)
    lengths = [N for N in budget.lengths if free is None or free >= N * _BYTES_A_TOKEN]
    sweep = OperatorSweep(
        tuple(lengths), (1,) * len(lengths), _HEADS, _HEAD_SIZE, (torch.float32,), False,
        budget.bench_seconds, budget.max_call_seconds,
    )  # fmt: skip
    rows: list[Row] = []
    for row in sweep_operators(sweep, device):
        rows.append(row)
        print(format_row(row, rows), flush=True)
    partial = folder.with_name(f".{folder.name}-partial")
    shutil.rmtree(partial, ignore_errors=True)
    about = machine_facts(device) | {"heads": _HEADS, "head_size": _HEAD_SIZE, "load": os.getloadavg()[0]}
    write_rows(rows, about, partial)
    os.replace(partial, folder)


def _line(name: str, rows: Sequence[Row]) -> Line:
    long = slope_rows(rows)
    if len(long) < 2:
        raise ConfigError(
            f"{_LABELS[name]} was timed at {len(long)} lengths above 1,000 tokens; a slope needs 2: this "
            "machine is too slow or too busy for it, so leave the panel out with --panels"
        )
    seconds = {row.size: row.seconds for row in rows}
    return Line(_LABELS[name], seconds, fitted_slope(long), [row.size for row in long])


def _facts(rows: Sequence[Row], about: dict[str, Any]) -> dict[str, str]:
    lengths = sorted({row.size for row in rows})
    repeats = sorted({row.repeats for row in rows})
    shape = (
        f"{about['heads']} heads of {about['head_size']}"
        if "heads" in about
        else "the heads of the benchmark"
    )
    return {
        "Data": f"random q, k and v in {rows[0].dtype}, batch {rows[0].batch_size}, {shape}, not causal",
        "Sizes": f"{', '.join(f'{N:,}' for N in lengths)} tokens",
        "Budget": f"medians of {repeats[0]} to {repeats[-1]} repeats, in turn, after one to warm up",
        "Checked": "every operator's output and gradient against float64 before it is timed",
        "Machine": f"{about['machine']}, {about['threads']} threads, torch {about['torch']}, {about['date']}",
    }


def _limits(about: Mapping[str, Any]) -> Iterator[str]:
    yield "One operator; of a model's step attention is only a part (clip-la bench --level model)."
    load = about.get("load")
    if load is not None and load > _BUSY * about["cores"]:
        yield f"The machine was busy with other work: load {load:.1f} on {about['cores']} cores."


def _table(lines: Mapping[str, Line]) -> Table:
    softmax = lines["softmax"].seconds
    rows = []
    for N in sorted({N for line in lines.values() for N in line.seconds}):
        times = [line.seconds.get(N) for line in lines.values()]
        ratios = [softmax[N] / lines[name].seconds[N] if N in softmax else None for name in ("eq4", "eq7")]
        rows.append(
            [
                f"{N:,}",
                *("-" if seconds is None else f"{seconds * 1e3:,.1f}" for seconds in times),
                *("-" if ratio is None else f"{ratio:,.1f}" for ratio in ratios),
            ]
        )
    return Table(
        "Milliseconds of a forward and backward pass, and softmax's time over the linear ones'",
        ["Tokens", *_LABELS.values(), "softmax / Eq. 4", "softmax / Eq. 7"],
        rows,
    )
