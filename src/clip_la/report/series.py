"""Everything that the figures show as rows of CSV: training, evaluations and diagnostics."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from clip_la.report.axes import AXES, positions
from clip_la.report.facts import ModelFacts
from clip_la.report.runs import Run
from clip_la.report.summary import smooth_losses


def training_csv(runs: Sequence[Run], facts: Mapping[str, ModelFacts]) -> str:
    """A row a log interval: its place on every x axis, the loss raw and smoothed, and all that was logged."""
    return _csv(row for run in runs for row in _training_rows(run, facts[run.name]))


def evaluations_csv(runs: Sequence[Run], facts: Mapping[str, ModelFacts]) -> str:
    """A row a metric of each evaluation."""
    return _csv(row for run in runs for row in _evaluation_rows(run, facts[run.name]))


def diagnostics_csv(runs: Sequence[Run]) -> str:
    """A row a figure of each attention layer and measurement; empty without diagnostics."""
    return _csv(
        {
            "run": run.name,
            "samples": point.samples,
            **dict(zip(("tower", "layer", "figure"), key.split("/"), strict=False)),
            "value": value,
        }
        for run in runs
        for point in run.diagnostics
        for key, value in point.layers.items()
    )


def last_diagnostics(runs: Sequence[Run]) -> dict[str, Any]:
    """Run -> the first and the last measurement, for JSON."""
    return {
        run.name: {"first": asdict(run.diagnostics[0]), "last": asdict(run.diagnostics[-1])}
        for run in runs
        if run.diagnostics
    }


def _training_rows(run: Run, facts: ModelFacts) -> Iterator[dict[str, Any]]:
    places = _places(run, facts, [point.samples for point in run.train])
    smooth = smooth_losses(run.train)
    for point, place, loss in zip(run.train, places, smooth, strict=True):
        rest = asdict(point)
        del rest["samples"], rest["seconds"]
        yield {"run": run.name, **place, "loss": rest.pop("loss"), "loss_smoothed": loss, **rest}


def _evaluation_rows(run: Run, facts: ModelFacts) -> Iterator[dict[str, Any]]:
    places = _places(run, facts, [point.samples for point in run.evals])
    for point, place in zip(run.evals, places, strict=True):
        for key, value in point.metrics.items():
            if value is None or isinstance(value, (int, float)):
                shown = "nan" if value is None else value
                yield {"run": run.name, "name": point.name, **place, "metric": key, "value": shown}


def _places(run: Run, facts: ModelFacts, samples: Sequence[int]) -> list[dict[str, Any]]:
    columns = {
        axis.key: positions(axis, run, facts, np.array(samples, dtype=np.float64)) for axis in AXES
    } | {"samples": samples}
    return [
        {key: None if column is None else column[i] for key, column in columns.items()}
        for i in range(len(samples))
    ]


def _csv(rows: Iterator[dict[str, Any]]) -> str:
    found = list(rows)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(found[0]) if found else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return buffer.getvalue()
