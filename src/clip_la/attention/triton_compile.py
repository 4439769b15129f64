"""Compiling recorded launches for sm_90, on any machine, and what they take of a multiprocessor."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from clip_la.attention.triton_launch import Launch

HOPPER = GPUTarget("cuda", 90, 32)

_TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
_ALIGNED = [["tt.divisibility", 16]]


class Compiled(NamedTuple):
    """A kernel for Hopper.

    Attributes:
        registers: of a thread, of 255.
        spilled_bytes: of a thread, that found no place in registers.
        shared_bytes: of a program, of 232,448 (227 KiB).
        instructions: the matrix instructions used: "wgmma" (Hopper's own), "mma.sync" (from Ampere on).
        num_threads: of a program.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: tuple[str, ...]
    num_threads: int


def compile_for_hopper(launch: Launch) -> Compiled:
    """The kernel as this launch would compile it on an H100 or H200."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}
    names = launch.kernel.arg_names
    for index, (name, argument) in enumerate(zip(names, (*launch.arguments, launch.config), strict=True)):
        is_constant = argument is None or launch.kernel.params[index].is_constexpr
        signature[name] = "constexpr" if is_constant else _type(argument)
        if is_constant:
            constants[(index,)] = argument
        aligned |= dict.fromkeys(_aligned_paths(argument, (index,)), _ALIGNED)
    source = ASTSource(launch.kernel, signature, constants, aligned)
    options = {"num_warps": launch.config.num_warps, "num_stages": launch.config.num_stages}
    compiled = triton.compile(source, target=HOPPER, options=options)
    registers, spilled = _resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    instructions = tuple(name for name in ("wgmma", "mma.sync") if f"{name}." in ptx)
    return Compiled(registers, spilled, compiled.metadata.shared, instructions, 32 * launch.config.num_warps)


def _type(argument: Any) -> Any:
    """As Triton's launcher would call it."""
    if isinstance(argument, tuple):
        return tuple(_type(x) for x in argument)
    if isinstance(argument, Tensor):
        return _TYPES[argument.dtype]
    if isinstance(argument, int):
        return "i32" if argument < 2**31 else "i64"
    return "fp32"


def _aligned_paths(argument: Any, path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Pointers, and strides that are multiples of 16: lengths aren't specialised, so that none recompiles."""
    if isinstance(argument, Tensor):
        yield path
    elif isinstance(argument, tuple):
        for index, x in enumerate(argument):
            yield from _aligned_paths(x, (*path, index))
    elif isinstance(argument, int) and len(path) > 1 and argument % 16 == 0:
        yield path


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of local memory, which holds nothing but spilled registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"{tool} printed no register count: {usage[:500]}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local
