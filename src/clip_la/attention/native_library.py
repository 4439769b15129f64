"""Compiles the C++ sources in `native/` for this machine's CPU, once, and loads them.

The library lies in `$CLIP_LA_CACHE`, else `$XDG_CACHE_HOME/clip_la`, else `~/.cache/clip_la`, under a name
made of the sources, the compiler and the CPU, so that machines of several kinds can share a home folder. CXX
names another compiler than the first on the PATH, CXXFLAGS adds to its options.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).with_name("native")
_MAIN_SOURCE = "linear_attention.cpp"
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-Wno-psabi",
)
_TIMEOUT = 300  # seconds


class NativeUnavailableError(RuntimeError):
    """Why the compiled backend can't be had on this machine."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """The compiled library; the first call on a machine takes the seconds that compiling takes.

    Raises:
        NativeUnavailableError: there is no C++ compiler, it failed, or no folder could be written to.
    """
    compiler = _find_compiler()
    path = _cache_folder() / f"native-{_fingerprint(compiler)}.so"
    try:
        if not path.exists():
            _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(f"the compiled CPU kernels can't be kept or loaded: {error}") from error


@functools.cache
def why_unavailable() -> str | None:
    """None if the library can be used, else the reason."""
    try:
        load_library()
    except NativeUnavailableError as error:
        return str(error)
    return None


def _find_compiler() -> list[str]:
    """The command in CXX, else the first compiler on the PATH."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    looked_for = chosen[0] if chosen else "c++, g++ or clang++"
    raise NativeUnavailableError(
        f"found no C++ compiler ({looked_for}); install one (Debian: apt install g++), or name it in CXX"
    )


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("CLIP_LA_CACHE") or Path(home) / "clip_la")


def _fingerprint(compiler: list[str]) -> str:
    """What the compiled code depends on, as a short hash."""
    digest = hashlib.sha256(" ".join((*compiler, *_flags())).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False, timeout=_TIMEOUT)
    digest.update(version.stdout + b"\0" + _cpu().encode())
    return digest.hexdigest()[:16]


def _flags() -> list[str]:
    return [*_FLAGS, *shlex.split(os.environ.get("CXXFLAGS", ""))]


def _cpu() -> str:
    """The instruction sets of this machine's CPU, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = ("flags", "Features", "model name", "CPU part")
    return "\n".join([platform.machine(), *sorted({line for line in lines if line.startswith(names)})])


def _compile(compiler: list[str], path: Path) -> None:
    """Written beside its place first: another process may be doing the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    os.close(handle)
    command = [*compiler, *_flags(), str(SOURCES / _MAIN_SOURCE), "-o", part]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
        if result.returncode != 0:
            raise NativeUnavailableError(f"{shlex.join(command)} failed: {result.stderr.strip()[-2000:]}")
        os.replace(part, path)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailableError(f"{shlex.join(command)} took longer than {_TIMEOUT} s") from error
    finally:
        Path(part).unlink(missing_ok=True)
