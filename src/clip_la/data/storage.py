"""Bytes of shards from local files, HTTP servers, fsspec stores and, where allowed, commands."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import fsspec

CHUNK_BYTES = 2**20
FIRST_DELAY_SECONDS = 0.25
LONGEST_DELAY_SECONDS = 8.0
BYTES_PER_EXTRA_RETRY = 2**24

T = TypeVar("T")


class ByteStream(Protocol):
    """What shards are read from: bytes, forwards only."""

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes; b"" only at the end."""


class NotAFileError(OSError):
    """A path that is a directory, a pipe or a device, none of which is a shard."""


def is_remote(url: str) -> bool:
    """Whether `url` is anything but a local path."""
    scheme = urlsplit(url).scheme if "://" in url else ""
    return url.startswith("pipe:") or scheme not in ("", "file")


def local_path(url: str) -> str:
    """The path of a local URL, with or without "file://"."""
    return url[len("file://") :] if url.startswith("file://") else url


@contextmanager
def open_stream(
    url: str, *, retries: int = 5, timeout_seconds: float = 30.0, allow_pipe: bool = False
) -> Iterator[ByteStream]:
    """Open `url` for one sequential read.

    Raises:
        FileNotFoundError: there is no such file.
        NotAFileError: a directory, named pipe or device, which could block for ever.
        PermissionError: a "pipe:" URL without `allow_pipe`.
        OSError: anything else; also from `read`, once the retries are used up.
    """
    if url.startswith("pipe:"):
        if not allow_pipe:
            raise PermissionError(f"{url} would run a command; allow it with --allow-pipe")
        with _run_command(url[len("pipe:") :]) as stream:
            yield stream
    elif is_remote(url):
        remote = RetryingStream(url, retries, timeout_seconds)
        try:
            yield remote
        finally:
            remote.close()
    else:
        with open_regular(local_path(url)) as file:
            yield file


def open_regular(path: str) -> BinaryIO:
    """Open a local regular file, unbuffered; never blocks on what is not one."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(f"{path} is not a tar: it is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_small(url: str, limit: int) -> bytes:
    """A whole file of at most `limit` bytes; ValueError for a larger one."""
    chunks, size = [], 0
    with open_stream(url) as stream:
        while chunk := stream.read(min(CHUNK_BYTES, limit + 1 - size)):
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                raise ValueError(f"{url} is larger than {limit} bytes")
    return b"".join(chunks)


@contextmanager
def _run_command(command: str) -> Iterator[ByteStream]:
    with subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            yield process.stdout
        finally:
            process.kill()


class RetryingStream:
    """A remote file read forwards; a failed, stalled or cut-short read is taken up where it broke off."""

    def __init__(self, url: str, retries: int, timeout_seconds: float) -> None:
        self._url = url
        self._retries = retries
        self._num_failures = 0
        self._timeout_seconds = timeout_seconds
        self._offset = 0
        self._file, self._size = self._retry(self._open)

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes; b"" only at the end of the file."""
        chunk = self._retry(lambda: self._read_once(size))
        self._offset += len(chunk)
        return chunk

    def close(self) -> None:
        """Close the connection."""
        self._file.close()

    def _read_once(self, size: int) -> bytes:
        if self._file.closed:
            self._file, _ = self._open()
        try:
            chunk = self._file.read(size)
            if not chunk and self._size is not None and self._offset < self._size:
                raise ConnectionError(f"{self._url} ended at byte {self._offset} of {self._size}")
        except Exception:
            self._file.close()
            raise
        return chunk

    def _open(self) -> tuple[BinaryIO, int | None]:
        if urlsplit(self._url).scheme in ("http", "https"):
            return _open_http(self._url, self._offset, self._timeout_seconds)
        return _open_fsspec(self._url, self._offset)

    def _retry(self, action: Callable[[], T]) -> T:
        while True:
            try:
                return action()
            except (FileNotFoundError, PermissionError):
                raise
            except Exception as error:
                self._num_failures += 1
                if self._num_failures > self._retries + self._offset // BYTES_PER_EXTRA_RETRY:
                    raise OSError(f"gave up after {self._num_failures} failures: {error!r}") from error
                delay = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** (self._num_failures - 1))
                logging.warning("%s: %r; trying again in %g s", self._url, error, delay)
                time.sleep(delay)


def _open_http(url: str, offset: int, timeout_seconds: float) -> tuple[BinaryIO, int | None]:
    """A response that begins at `offset`, and the size of the whole file where the server says it."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={offset}-"} if offset else {})
    try:
        response = urllib.request.urlopen(request, timeout=timeout_seconds)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (404, 410):
            raise FileNotFoundError(f"{url}: HTTP {error.code}") from error
        if 400 <= error.code < 500 and error.code not in (408, 425, 429):
            raise PermissionError(f"{url}: HTTP {error.code} {error.reason}") from error
        raise
    length = response.headers.get("Content-Length")
    start = offset if response.status == 206 else 0
    size = start + int(length) if length is not None else None
    _skip(response, offset - start)
    return cast(BinaryIO, response), size


def _open_fsspec(url: str, offset: int) -> tuple[BinaryIO, int | None]:
    filesystem, path = fsspec.core.url_to_fs(url)
    file = filesystem.open(path, "rb", block_size=8 * CHUNK_BYTES, cache_type="readahead")
    file.seek(offset)
    return cast(BinaryIO, file), getattr(file, "size", None)


def _skip(stream: ByteStream, num_bytes: int) -> None:
    while num_bytes > 0:
        chunk = stream.read(min(num_bytes, CHUNK_BYTES))
        if not chunk:
            raise ConnectionError(f"ended {num_bytes} bytes before the place to go on from")
        num_bytes -= len(chunk)
