"""Reports read from the metrics.jsonl of runs: comparisons, curves, listings, scaling-law fits."""

from clip_la.report.listing import list_runs, listing_text
from clip_la.report.runs import RunError, read_run, read_runs
from clip_la.report.write import ReportSummary, write_report

__all__ = ["ReportSummary", "RunError", "list_runs", "listing_text", "read_run", "read_runs", "write_report"]
