"""`clip-la fit`: runs of different sizes to power laws, one for each attention."""

from __future__ import annotations

import argparse
from pathlib import Path

from clip_la.report.scaling import write_fit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    add("--out", type=Path, default=Path("fit"), help="folder to write (default: %(default)s)")
    add(
        "--loss",
        default="train",
        metavar="NAME",
        help="which loss: train, or an evaluation's name, such as validation (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    summary = write_fit(args.runs, args.out, loss=args.loss)
    print(summary.text)
    print("\nwritten: " + ", ".join(map(str, summary.paths)))
    return 0
