"""`clip-la fit`: runs of different sizes to power laws, one for each attention."""

from __future__ import annotations

import argparse
from pathlib import Path

from clip_la.report.scaling_files import write_fit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    add("--out", type=Path, default=Path("fit"), help="folder to write (default: %(default)s)")
    add(
        "--loss",
        default="validation",
        metavar="NAME",
        help="an evaluation whose loss is at a fixed number of negatives, or train (default: %(default)s)",
    )
    add(
        "--parameters",
        choices=("image", "text", "total"),
        default="image",
        help="what the size of a model is: the parameters of a tower, or of the whole (default: %(default)s)",
    )
    add(
        "--at",
        type=float,
        nargs="+",
        default=(),
        metavar="N",
        help="further sizes to compare kinds at, as 1e9",
    )


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    summary = write_fit(args.runs, args.out, loss=args.loss, parameters=args.parameters, at=args.at)
    print(summary.text)
    print("\nwritten: " + ", ".join(map(str, summary.paths)))
    return 0
