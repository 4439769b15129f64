"""What `clip-la bench` does: measure, print line by line, write the files."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from clip_la.bench.models import Step
from clip_la.bench.plot import plot_times
from clip_la.bench.sweep import OperatorSweep, Row, backends, sweep_models, sweep_operators
from clip_la.bench.timing import available_memory
from clip_la.bench.write import format_row, write_rows
from clip_la.host_memory import keep_freed_memory

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PRECISIONS = {"float32": "fp32", "bfloat16": "amp_bf16"}
_QUICK_LENGTHS = (197, 577, 1025, 2049)
_LENGTHS = (197, 577, 1025, 4097, 16385, 65537, 262145, 1048577)
_TOKENS = 4096  # a batch has about so many, so that short sequences fill the machine too
_IMAGES = {224: 8, 448: 2, 896: 1, 1792: 1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument(
        "--out", type=Path, default=Path("bench"), help="folder for the files (default: bench)"
    )
    parser.add_argument("--quick", action="store_true", help="a first look, in about two minutes on a laptop")
    parser.add_argument("--level", choices=("all", "operator", "model"), default="all", help="what to time")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="N", help="tokens (default: 197 to 1M)")
    parser.add_argument("--batch-size", type=int, help="sequences (default: about 4096 tokens, at least one)")
    parser.add_argument("--heads", type=int, default=12, help="(default: %(default)s, as in ViT-B)")
    parser.add_argument("--head-size", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--causal", action="store_true", help="attention as in the text tower")
    parser.add_argument(
        "--dtype", choices=tuple(_DTYPES), nargs="+", default=["float32", "bfloat16"], help="(default: both)"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=["ViT-B-16", "ViT-B-16-LA"],
        metavar="MODEL",
        help="the first is the baseline",
    )
    parser.add_argument(
        "--image-size", type=int, nargs="+", help="pixels a side (default: 224 448 896, on a GPU also 1792)"
    )
    parser.add_argument(
        "--tower", choices=("both", "image"), default="both", help="a whole step, or one tower's"
    )
    parser.add_argument("--seconds", type=float, help="of repeats a line (default: 5, with --quick 1)")
    parser.add_argument("--device", help="(default: cuda if there is one)")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    for path in run_bench(args):
        print(f"wrote {path}")
    return 0


def run_bench(args: argparse.Namespace) -> list[Path]:
    """Measure, print, write; the files written.

    Raises:
        ErrorGateError: an operator's values or gradients are wrong.
    """
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu":
        keep_freed_memory()
    budget = args.seconds or (1.0 if args.quick else 5.0)
    rows: list[Row] = []
    sweep = _operator_sweep(args, budget, device)
    about = machine_facts(device) | {"backends": backends(sweep, device)}
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    if args.level != "model":
        _collect(sweep_operators(sweep, device), rows)
    if args.level != "operator":
        _collect(sweep_models(args.models, list(_steps(args, device)), device, budget=budget), rows)
    written = write_rows(rows, about, args.out)
    if args.level != "model":
        plots = [args.out / "time.png", args.out / "time.svg"]
        heads = f"{args.heads} heads of {args.head_size}{', causal' if args.causal else ''}"
        plot_times(rows, f"{about['machine']}, {heads}, medians and quartiles", plots)
        written += plots
    return written


def _collect(measured: Iterable[Row], rows: list[Row]) -> None:
    for row in measured:
        rows.append(row)
        print(format_row(row, rows), flush=True)


def _operator_sweep(args: argparse.Namespace, budget: float, device: torch.device) -> OperatorSweep:
    lengths = sorted(args.lengths or (_QUICK_LENGTHS if args.quick else _LENGTHS))
    available = available_memory(device)
    if available is not None:
        fitting = [N for N in lengths if _bytes_needed(args, N) <= available]
        if len(fitting) < len(lengths):
            too_long = ", ".join(str(N) for N in lengths if N not in fitting)
            print(f"left out for lack of memory: {too_long} tokens (fewer --heads need less)")
        lengths = fitting
    batch_sizes = tuple(args.batch_size or max(_TOKENS // N, 1) for N in lengths)
    return OperatorSweep(
        tuple(lengths), batch_sizes, args.heads, args.head_size, tuple(_DTYPES[name] for name in args.dtype),
        args.causal, budget, max_call=2.0 if args.quick else 60.0,
    )  # fmt: skip


def _bytes_needed(args: argparse.Namespace, N: int) -> int:
    """Of q, k, v, the output, the gradients and the ceilings' operands, about eight times q, k and v."""
    B = args.batch_size or max(_TOKENS // N, 1)
    item_size = max(_DTYPES[name].itemsize for name in args.dtype)
    elements: int = 3 * B * N * args.heads * args.head_size
    return 8 * elements * item_size


def _steps(args: argparse.Namespace, device: torch.device) -> Iterator[Step]:
    default = [224] if args.quick else [224, 448, 896, *([1792] if device.type == "cuda" else [])]
    for name in args.dtype:
        if name not in _PRECISIONS:
            raise ValueError(f"models are timed in {' and '.join(_PRECISIONS)}, not in {name}")
        for image_size in args.image_size or default:
            batch_size = args.batch_size or _IMAGES.get(image_size, 1)
            yield Step(image_size, batch_size, _PRECISIONS[name], args.tower)


def machine_facts(device: torch.device) -> dict[str, Any]:
    """On what machine and with what versions something is measured."""
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "clip_la": version("clip_la"),
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
