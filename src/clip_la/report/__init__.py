"""Reports read from the metrics.jsonl of runs: comparisons, curves, listings, scaling-law fits."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clip_la.report.listing import list_runs, listing_text
    from clip_la.report.runs import RunError, read_run, read_runs
    from clip_la.report.scaling_files import FitSummary, write_fit
    from clip_la.report.write import ReportSummary, write_report

__all__ = [
    "FitSummary",
    "ReportSummary",
    "RunError",
    "list_runs",
    "listing_text",
    "read_run",
    "read_runs",
    "write_fit",
    "write_report",
]
_MODULES = {
    "FitSummary": "scaling_files",
    "ReportSummary": "write",
    "RunError": "runs",
    "list_runs": "listing",
    "listing_text": "listing",
    "read_run": "runs",
    "read_runs": "runs",
    "write_fit": "scaling_files",
    "write_report": "write",
}


def __getattr__(name: str) -> Any:
    """A public name, imported at its first use: listing runs needs no matplotlib."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
