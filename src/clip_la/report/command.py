"""`clip-la report`: runs to one page, a table and plots."""

from __future__ import annotations

import argparse
from pathlib import Path

from clip_la.report.write import write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    add("--out", type=Path, default=Path("report"), help="folder to write (default: %(default)s)")
    add("--log-axis", action="store_true", help="losses on a logarithmic axis")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    summary = write_report(args.runs, args.out, log_axis=args.log_axis)
    print(summary.text)
    print("\nwritten: " + ", ".join(map(str, summary.paths)))
    return 0
