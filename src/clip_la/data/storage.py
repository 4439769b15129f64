"""Bytes of shards: from local files, remote stores and, where that is allowed, commands."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Protocol
from urllib.parse import urlsplit

from clip_la.data.remote import CHUNK_BYTES, RetryingStream

PIPE = "pipe:"


class ByteStream(Protocol):
    """What shards are read from: bytes, forwards only."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes; b"" only at the end."""


@dataclass(frozen=True)
class OpenOptions:
    """How files are opened; see DataSpec."""

    retries: int = 5
    timeout_seconds: float = 30.0
    allow_pipe: bool = False


class TooLargeError(ValueError):
    """A file over the limit that was set for it."""


class NotAFileError(OSError):
    """A path that is a directory, a pipe or a device."""


def is_remote(url: str) -> bool:
    """Whether `url` is anything but a local path."""
    scheme = urlsplit(url).scheme if "://" in url else ""
    return url.startswith(PIPE) or scheme not in ("", "file")


def local_path(url: str) -> str:
    """The path of a local URL, with or without "file://"."""
    return url.removeprefix("file://")


@contextmanager
def open_stream(url: str, options: OpenOptions) -> Iterator[ByteStream]:
    """Open `url` for one sequential read.

    Raises:
        FileNotFoundError: there is no such file.
        NotAFileError: a directory, named pipe or device, which could block for ever.
        PermissionError: no permission; also a "pipe:" URL where those aren't allowed.
        OSError: anything else; also from `read`, once the retries are used up.
    """
    if url.startswith(PIPE):
        if not options.allow_pipe:
            raise PermissionError(f"{url} would run a command, which has to be allowed by a flag")
        with closing(CommandStream(url.removeprefix(PIPE))) as command:
            yield command
    elif is_remote(url):
        with closing(RetryingStream(url, options.retries, options.timeout_seconds)) as remote:
            yield remote
    else:
        with open_regular(local_path(url)) as file:
            yield file


def open_regular(path: str) -> BinaryIO:
    """Open a local regular file, unbuffered; never blocks on what is not one."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(f"{path} is not a tar: not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_small(url: str, limit: int, options: OpenOptions) -> bytes:
    """A whole file of at most `limit` bytes.

    Raises:
        TooLargeError: a larger one.
        OSError: as `open_stream`.
    """
    chunks, size = [], 0
    with open_stream(url, options) as stream:
        while chunk := stream.read(min(CHUNK_BYTES, limit + 1 - size)):
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                raise TooLargeError(f"{url} is larger than {limit:,} bytes")
    return b"".join(chunks)


class CommandStream:
    """What a shell command writes; a command that fails is an OSError at its end."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._process = subprocess.Popen(
            # As the workers: what a cluster sends to every process of a job must not cut a shard short.
            f"trap '' TERM INT USR1 USR2\n{command}",
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes; b"" only at the end."""
        assert self._process.stdout is not None
        chunk = self._process.stdout.read(size)
        if not chunk and self._process.wait():
            raise OSError(f"command {self._command!r} ended with status {self._process.returncode}")
        return chunk

    def close(self) -> None:
        """End the command and whatever it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
