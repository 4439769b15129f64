"""Reports read from the metrics.jsonl of runs."""
