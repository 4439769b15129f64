"""`python -m clip_la.attention.triton_table`: what the Triton kernels take of a Hopper GPU, without one.

Compiles for sm_90 what the backend launches (recorded from it, with tensors on "meta"), and prints a table
of registers, spills, shared memory and matrix instructions. Ends with 1 if a kernel spills, takes more than
the hardware has, or uses no matrix instruction. Below it stand predicted times: bytes and products of the
launches over the hardware's rates, not measurements.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import sys
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from clip_la.attention import triton_backend
from clip_la.attention.contract import Gradients, Inputs, Options, empty_forward
from clip_la.attention.triton_compile import Compiled, compile_for_hopper
from clip_la.attention.triton_launch import Launch, recording

MAX_REGISTERS = 255
MAX_SHARED_BYTES = 227 * 1024

HEAD_SIZES = (32, 64, 80, 96, 128)
DTYPES = tuple(triton_backend.MAX_HEAD_SIZES)
KINDS = {
    "eq7": Options("eq7", causal=False, scale=0.5, normalise=True),
    "eq4": Options("eq4", causal=False, scale=None, normalise=True),
    "centred": Options("eq7", causal=False, scale=0.5, normalise=True, centre_values=True),
}
"""Eq. 7 with a gain, Eq. 4 with normalised rows, Eq. 7 with a gain and centred values. Without a gain or with
raw rows, code is only left out."""

QUICK = {(torch.bfloat16, 64)}
"""What `--quick` compiles of dtypes and head sizes."""

COPY_BYTES_PER_SECOND = 4.3e12
"""Measured on an H200."""

MATRIX_FLOP_PER_SECOND = 395e12
"""Half of what large bfloat16 products reach on an H200: these are small."""

_SHAPES = {False: ((64, 12, 256), (1, 8, 4096)), True: ((64, 8, 77), (64, 8, 512), (1, 8, 4096))}
"""For full and causal attention: B, H and N that reach every kernel: a program a head, several, one tile."""

_PRODUCTS = {
    "full_forward_kernel": (4, 0),
    "full_backward_kernel": (8, 0),
    "group_sums_kernel": (2, 0),
    "queries_kernel": (2, 0),
    "query_gradients_kernel": (4, 0),
    "key_gradients_kernel": (4, 0),
    "tile_forward_kernel": (0, 2),
    "tile_backward_kernel": (0, 6),
    "scan_forward_kernel": (4, 2),
    "scan_query_gradients_kernel": (4, 2),
    "scan_key_gradients_kernel": (4, 2),
    "scan_value_gradients_kernel": (4, 2),
    "exclusive_sums_kernel": (0, 0),
    "denominator_gradients_kernel": (0, 0),
}
"""Of Eq. 7 in bfloat16, for each token: products of a row with a (D, E) state, and with a (BLOCK, D) tile.
Those with the state or for it count twice, for the high and the low part of what was computed."""

_PREDICTED = (
    ("image, 224 px", 256, 12, 197, False),
    ("text", 256, 8, 77, True),
    ("1k tokens", 4, 8, 1024, False),
    ("4k tokens", 4, 8, 4096, False),
    ("64k tokens", 4, 8, 65536, False),
    ("4e6 tokens", 4, 8, 4_000_000, False),
    ("4k tokens, causal", 4, 8, 4096, True),
    ("64k tokens, causal", 4, 8, 65536, True),
)


class Row(NamedTuple):
    """One kernel of the table."""

    launch: Launch
    dtype: torch.dtype
    kind: str
    compiled: Compiled

    @property
    def problems(self) -> list[str]:
        """What the hardware or speed forbids."""
        found = []
        if self.compiled.spilled_bytes > 0:
            found.append(f"spills {self.compiled.spilled_bytes} bytes")
        if self.compiled.registers > MAX_REGISTERS:
            found.append(f"needs {self.compiled.registers} registers")
        if self.compiled.shared_bytes > MAX_SHARED_BYTES:
            found.append(f"needs {self.compiled.shared_bytes} bytes of shared memory")
        if _PRODUCTS[_name(self.launch)] != (0, 0) and not self.compiled.instructions:
            found.append("uses no matrix instruction")
        return found


def record(
    B: int, H: int, N: int, D: int, dtype: torch.dtype, options: Options, *, gain: bool = True
) -> tuple[list[Launch], list[Launch]]:
    """The launches of a forward and of a backward pass over a packed projection."""
    gains = torch.empty(H, device="meta") if gain and options.kind == "eq7" else None
    inputs = Inputs(*_packed(B, H, N, D, dtype), gains, None, options)
    result = empty_forward(inputs)
    with recording() as forward:
        triton_backend.forward(inputs, result)
    gradients = Gradients(*_packed(B, H, N, D, dtype), gains)
    with recording() as backward:
        triton_backend.backward(torch.empty_like(result.out), inputs, result, gradients)
    return forward, backward


def kernels(dtype: torch.dtype, D: int, kind: str) -> Iterator[Launch]:
    """Every kernel that inputs of such rows are served with, once."""
    seen = set()
    for causal, shapes in _SHAPES.items():
        options = dataclasses.replace(KINDS[kind], causal=causal)
        if causal and options.centre_values:
            continue
        for shape in shapes:
            for launch in itertools.chain(*record(*shape, D, dtype, options)):
                key = (_name(launch), launch.config, tuple(x is None for x in launch.arguments))
                if key not in seen:
                    seen.add(key)
                    yield launch


def compile_rows(dtypes_and_sizes: set[tuple[torch.dtype, int]], kinds: Collection[str]) -> Iterator[Row]:
    """A row for each kernel that the backend launches for these inputs, compiled for sm_90."""
    for dtype, D in itertools.product(DTYPES, HEAD_SIZES):
        if (dtype, D) in dtypes_and_sizes and triton_backend.MAX_HEAD_SIZES[dtype] >= D:
            for kind in kinds:
                for launch in kernels(dtype, D, kind):
                    yield Row(launch, dtype, kind, compile_for_hopper(launch))


def predicted_seconds(launches: list[Launch]) -> tuple[float, float]:
    """By bytes alone (each tensor once), and by whichever of bytes and products takes longer."""
    by_bytes = [_num_bytes(launch) / COPY_BYTES_PER_SECOND for launch in launches]
    by_products = [_num_flop(launch) / MATRIX_FLOP_PER_SECOND for launch in launches]
    return sum(by_bytes), sum(map(max, by_bytes, by_products))


def _num_bytes(launch: Launch) -> int:
    first_of = (x[0] if isinstance(x, tuple) else x for x in launch.arguments)
    tensors = {id(x): x for x in first_of if isinstance(x, Tensor)}
    return sum(x.numel() * x.element_size() for x in tensors.values())


def _num_flop(launch: Launch) -> int:
    with_state, with_tile = _PRODUCTS[_name(launch)]
    num_rows = max((x[0].shape[:3].numel() for x in launch.arguments if isinstance(x, tuple)), default=0)
    config = launch.config
    return 2 * num_rows * config.BLOCK_D * (with_state * config.BLOCK_E + with_tile * config.BLOCK)


def _packed(B: int, H: int, N: int, D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.empty(B, N, 3, H, D, dtype=dtype, device="meta").permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _name(launch: Launch) -> str:
    return str(launch.kernel.__name__)


def _label(launch: Launch) -> str:
    """Scans are compiled twice: where programs share a head, they start from the sums of other groups."""
    name = _name(launch).removesuffix("_kernel")
    return f"{name} (groups)" if name.startswith("scan") and launch.grid[1] > 1 else name


def _print_table(rows: Iterator[Row]) -> list[str]:
    """Prints the table row by row; the problems found."""
    problems = []
    columns = (
        "kernel",
        "kind",
        "dtype",
        "D",
        "tile",
        "registers",
        "spilled",
        "shared KiB",
        "instruction",
    )
    print("|", " | ".join(columns), "|")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        config, compiled = row.launch.config, row.compiled
        name, dtype = _label(row.launch), str(row.dtype).removeprefix("torch.")
        cells: tuple[Any, ...] = (
            name,
            row.kind,
            dtype,
            config.D,
            f"{config.BLOCK} x {config.num_warps} x {config.num_stages}",
            compiled.registers,
            compiled.spilled_bytes,
            f"{compiled.shared_bytes / 1024:.0f}",
            ", ".join(compiled.instructions) or "-",
        )
        print("|", " | ".join(map(str, cells)), "|", flush=True)
        problems += [f"{name} {row.kind} {dtype} D = {config.D}: {problem}" for problem in row.problems]
    return problems


def _print_predictions() -> None:
    columns = (
        "Eq. 7, bfloat16, D = 64",
        "forward: bytes",
        "forward",
        "backward: bytes",
        "backward",
        "launches",
    )
    print("|", " | ".join(columns), "|")
    print("|---|---|---|---|---|---|")
    for name, B, H, N, causal in _PREDICTED:
        options = Options("eq7", causal, 0.5, normalise=True)
        passes = record(B, H, N, 64, torch.bfloat16, options, gain=False)
        times = [1e3 * seconds for launches in passes for seconds in predicted_seconds(launches)]
        cells = [f"{name}: B{B} H{H} N{N}", *(f"{time:.3g}" for time in times)]
        print("|", " | ".join(cells), "|", " + ".join(str(len(launches)) for launches in passes), "|")


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 if a kernel is over a limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few configurations instead of all")
    parser.add_argument(
        "--dtype", choices=[str(x).removeprefix("torch.") for x in DTYPES], help="this one only"
    )
    parser.add_argument("--head-size", type=int, choices=HEAD_SIZES, help="this one only")
    parser.add_argument("--kind", choices=tuple(KINDS), help="this one only")
    options = parser.parse_args(arguments)
    chosen = QUICK if options.quick else set(itertools.product(DTYPES, HEAD_SIZES))
    if options.dtype is not None:
        chosen = {pair for pair in chosen if pair[0] == getattr(torch, options.dtype)}
    if options.head_size is not None:
        chosen = {pair for pair in chosen if pair[1] == options.head_size}
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    print(f"Compiled for sm_90 on {today} with Triton {triton.__version__} (torch {torch.__version__}).\n")
    problems = _print_table(compile_rows(chosen, KINDS if options.kind is None else [options.kind]))
    print("\nPREDICTED times in ms, from bytes and products; nothing here was measured.\n")
    _print_predictions()
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
