"""`clip-la reproduce`: the paper's three figures in one command, on this machine or on a cluster."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from clip_la.config import ConfigError
from clip_la.exit_codes import EXIT_FINISHED

PANELS = ("time", "convergence", "fit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add = parser.add_argument
    add(
        "--scale",
        choices=("cpu", "h200"),
        default="cpu",
        help="cpu: small models here, about half an hour on two idle cores; h200: LAION-400M on a cluster "
        "(default: %(default)s)",
    )
    add("--out", type=Path, default=Path("reproduction"), help="folder for everything (default: %(default)s)")
    add(
        "--panels", type=_panels, default=PANELS, metavar="A,B", help="of time,convergence,fit (default: all)"
    )
    add("--quick", action="store_true", help="cpu: a smoke test of everything, about 5 minutes")
    add(
        "--processes", type=int, default=os.cpu_count() or 1, help="cpu: trainings at a time (default: cores)"
    )
    cluster = parser.add_argument_group("cluster (h200)")
    cluster.add_argument(
        "--dry-run", action="store_true", help="print the plan and the commands, submit nothing"
    )
    cluster.add_argument(
        "--repo", type=Path, default=Path(), help="a clone of the repository (default: here)"
    )
    cluster.add_argument("--nodes", type=int, default=4, help="of each training (default: %(default)s)")
    cluster.add_argument("--gpus-per-node", type=int, default=8, help="(default: %(default)s)")
    cluster.add_argument(
        "--sbatch", default="", metavar="OPTIONS", help="for all jobs: --sbatch='--account=x'"
    )
    data = parser.add_argument_group("data (cpu: default is a generated set; h200: needed)")
    data.add_argument("--data", metavar="SHARDS", help="training shards, as DIR/{00000..00006}.tar")
    data.add_argument("--val-data", metavar="SHARDS", help="other shards, for the held-out loss")
    data.add_argument("--zeroshot", metavar="DIR", help="zero-shot tree, one folder a class")
    data.add_argument(
        "--classnames", metavar="FILE", help="its class names, or a known list's name (default: the tree's)"
    )
    data.add_argument("--templates", default="photo", help="prompt templates (default: %(default)s)")


def _panels(text: str) -> tuple[str, ...]:
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in PANELS]:
        raise argparse.ArgumentTypeError(f"no panel {', '.join(unknown)}; there are {', '.join(PANELS)}")
    return tuple(name for name in PANELS if name in chosen)


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    if args.processes < 1:
        raise ConfigError(f"--processes is {args.processes}; expected 1 or more")
    return _run_cpu(args) if args.scale == "cpu" else _run_h200(args)


def _run_cpu(args: argparse.Namespace) -> int:
    from clip_la.reproduce.cpu import CpuRun, reproduce  # takes seconds; the help needs none of it
    from clip_la.reproduce.dataset import given
    from clip_la.reproduce.write import text_of

    data = None
    if args.data is not None:
        data = given(args.data, args.val_data, args.zeroshot, args.classnames, args.templates)
    elif args.val_data or args.zeroshot or args.classnames:
        raise ConfigError(
            "--val-data, --zeroshot and --classnames go with --data; the generated set has its own"
        )
    panels, paths = reproduce(CpuRun(args.out.resolve(), args.quick, args.panels, args.processes, data))
    print(text_of(panels))
    print("\nwritten: " + ", ".join(map(str, paths)))
    return EXIT_FINISHED


def _run_h200(args: argparse.Namespace) -> int:
    from clip_la.reproduce.h200 import reproduce
    from clip_la.reproduce.h200_plan import ClusterRun
    from clip_la.reproduce.write import text_of

    flags = {
        "train_data": args.data,
        "val_data": args.val_data,
        "zeroshot": args.zeroshot,
        "classnames": args.classnames,
        "templates": args.templates if args.zeroshot else None,
    }
    run = ClusterRun(
        out=args.out,
        repo=args.repo,
        flags={name: value for name, value in flags.items() if value is not None},
        nodes=args.nodes,
        gpus_per_node=args.gpus_per_node,
        sbatch=shlex.split(args.sbatch),
        panels=args.panels,
    )
    panels, paths = reproduce(run, dry_run=args.dry_run)
    if panels:
        print(text_of(panels))
        print("\nwritten: " + ", ".join(map(str, paths)))
    return EXIT_FINISHED
