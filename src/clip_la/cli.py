"""`clip-la`: a table of modules, one a command; `add_arguments(parser)` and `run(args)` are in each.

A command's module is imported when the command is used: torch and OpenCLIP take seconds, and listing runs or
reading a help text needs neither.
"""

from __future__ import annotations

import argparse
import importlib
import io
import logging
import sys
from collections.abc import Sequence
from typing import NamedTuple

from clip_la.errors import ExpectedError
from clip_la.exit_codes import EXIT_FAILED
from clip_la.version import __version__


class _Command(NamedTuple):
    module: str
    help: str


_COMMANDS = {
    "demo-data": _Command(
        "clip_la.data.demo", "Generate a small image-text set with a held-out zero-shot tree."
    ),
    "check": _Command(
        "clip_la.data.check_command", "Read shards or a table through: usable pairs, and what is wrong."
    ),
    "train": _Command(
        "clip_la.train.command",
        "Train a model. Flags are OpenCLIP's and win over the config; run again to continue.",
    ),
    "submit": _Command(
        "clip_la.cluster.submit",
        "Show what a run will take, check it, and submit it to Slurm; `clip-la train` flags follow.",
    ),
    "eval": _Command(
        "clip_la.evaluate.command",
        "Zero-shot accuracy, or image-text retrieval, of any CLIP that OpenCLIP builds.",
    ),
    "watch": _Command(
        "clip_la.cluster.watch",
        "Evaluate each checkpoint that a training run keeps, until the run has ended.",
    ),
    "report": _Command(
        "clip_la.report.command", "Compare runs: table, curves, one self-contained HTML page."
    ),
    "fit": _Command(
        "clip_la.report.fit_command", "Fit L(N) = a N^-b over runs of different sizes, for each attention."
    ),
    "export": _Command(
        "clip_la.export.command",
        "A trained model for other tools: OpenCLIP hub folder, safetensors, ONNX, the Hugging Face Hub.",
    ),
    "embed": _Command(
        "clip_la.inference.embed",
        "Embeddings of images and texts: .npy with parquet metadata, in the layout of clip-retrieval.",
    ),
    "classify": _Command(
        "clip_la.inference.classify", "How probable each of your labels is for your pictures."
    ),
    "bench": _Command(
        "clip_la.bench.command",
        "Time softmax, Eq. 4 and Eq. 7 over lengths and whole models' training steps; memory and errors too.",
    ),
    "reproduce": _Command(
        "clip_la.reproduce.command",
        "The paper's three figures in one command: on this machine within an hour, or on a cluster.",
    ),
    "runs": _Command(
        "clip_la.report.listing", "List the runs of a logs folder: state, progress, last figures."
    ),
    "models": _Command("clip_la.list_models", "List the models that this package adds to OpenCLIP's."),
}

_EXIT_CODES = """exit codes:
  0   done
  1   failed; the last line says why (for `check`: something is wrong with the shards)
  2   the command line or the config can't be used
  3   training stopped: too many non-finite steps in a row; the last good checkpoint is kept
  4   another rank of the job failed or is gone; the last line says which and why; the same command continues
  75  training was stopped by SIGTERM, SIGUSR1 or SIGINT and has saved; the same command continues
  128 + N  ended by signal N at once; a second stop signal ends training so, without a save"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; errors that a person can act on become one line and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may be no text
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser(*argv[:1])
    args, rest = parser.parse_known_args(argv)
    if rest and args.command not in ("train", "submit"):
        parser.error(f"unexpected {' '.join(rest)}")
    args.rest = rest
    _set_up_logging(getattr(args, "log_level", "info"))
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        code: int = args.run(args)
    except (ExpectedError, ValueError, OSError) as error:
        return _fail(error, getattr(error, "exit_code", EXIT_FAILED))
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except Exception as error:
        logging.getLogger("clip_la").exception("unexpected error")
        return _fail(f"{type(error).__name__}: {error}", EXIT_FAILED)
    return code


def _fail(error: Exception | str, code: int) -> int:
    logging.getLogger("clip_la").debug("in full:", exc_info=isinstance(error, Exception))
    print(f"clip-la: {error}", file=sys.stderr)
    return code


def _set_up_logging(level: str) -> None:
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logging.getLogger("clip_la").setLevel(level.upper())


def build_parser(*complete: str) -> argparse.ArgumentParser:
    """The parser of all commands; those in `complete` have their flags, of the others it knows the name."""
    parser = argparse.ArgumentParser(
        prog="clip-la",
        description="Train, evaluate and compare CLIP models with linear attention in both towers.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"clip-la {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        added = commands.add_parser(
            name,
            help=command.help,
            description=command.help,
            epilog=_EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name in complete:
            module = importlib.import_module(command.module)
            module.add_arguments(added)
            added.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
