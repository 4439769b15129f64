"""Remote shards: HTTP through urllib, other stores through fsspec, with bounded retries."""

from __future__ import annotations

import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPResponse
from typing import BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

import fsspec

CHUNK_BYTES = 2**20
FIRST_DELAY_SECONDS = 0.25
LONGEST_DELAY_SECONDS = 8.0
BYTES_PER_EXTRA_RETRY = 2**24
LEAST_BYTES_PER_SECOND = 1024
HTTP_SCHEMES = ("http", "https")
# Stores, and none of fsspec's schemes that cache to disk, unpack archives or chain others.
SCHEMES = (*HTTP_SCHEMES, "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "hdfs", "hf", "memory")

T = TypeVar("T")


class RefusedError(OSError):
    """A server's answer that trying again won't change."""


def check_scheme(url: str) -> None:
    """Refuse a URL that can't be read here.

    Raises:
        ValueError: an unknown scheme, or one whose client isn't installed.
    """
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise ValueError(f"{url} has scheme {scheme!r}; expected a local path or one of {', '.join(SCHEMES)}")
    if scheme not in HTTP_SCHEMES:
        try:
            fsspec.get_filesystem_class(scheme)
        except ImportError as error:
            raise ValueError(f"{url} can't be read: {error}") from error


class RetryingStream:
    """A remote file read forwards; a failed, stalled or cut-short read is taken up where it broke off.

    Args:
        url: of the file.
        retries: failures that are allowed, and one more for each 16 MiB read.
        timeout_seconds: of one read, over HTTP; also the time over which a transfer must not fall
            below 1 KiB/s.

    Raises:
        FileNotFoundError: no such file.
        RefusedError: not allowed.
        OSError: too many failures; also from `read`.
    """

    def __init__(self, url: str, retries: int, timeout_seconds: float) -> None:
        self._url = url
        self._retries = retries
        self._timeout_seconds = timeout_seconds
        self._num_failures = 0
        self._offset = 0
        self._window_seconds, self._window_bytes = 0.0, 0
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
            start = time.monotonic()
            chunk = self._file.read1(size) if isinstance(self._file, HTTPResponse) else self._file.read(size)
            if not chunk and self._size is not None and self._offset < self._size:
                raise ConnectionError(f"ended at byte {self._offset} of {self._size}")
            self._check_speed(time.monotonic() - start, len(chunk))
        except Exception:
            self._file.close()
            raise
        return chunk

    def _check_speed(self, seconds: float, num_bytes: int) -> None:
        self._window_seconds += seconds
        self._window_bytes += num_bytes
        if self._window_seconds > self._timeout_seconds:
            speed = self._window_bytes / self._window_seconds
            self._window_seconds, self._window_bytes = 0.0, 0
            if speed < LEAST_BYTES_PER_SECOND:
                raise TimeoutError(f"only {speed:.0f} bytes a second")

    def _open(self) -> tuple[BinaryIO | HTTPResponse, int | None]:
        if urlsplit(self._url).scheme in HTTP_SCHEMES:
            return _open_http(self._url, self._offset, self._timeout_seconds)
        return _open_fsspec(self._url, self._offset)

    def _retry(self, action: Callable[[], T]) -> T:
        while True:
            try:
                return action()
            except (FileNotFoundError, PermissionError, RefusedError):
                raise
            except Exception as error:  # every store has exceptions of its own
                self._num_failures += 1
                if self._num_failures > self._retries + self._offset // BYTES_PER_EXTRA_RETRY:
                    raise OSError(
                        f"gave up at byte {self._offset} after {self._num_failures} failures, the last "
                        f"{error!r}"
                    ) from error
                delay = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** min(self._num_failures - 1, 16))
                logging.warning("%s: %r; trying again in %g s", self._url, error, delay)
                time.sleep(delay)


def _open_http(url: str, offset: int, timeout_seconds: float) -> tuple[HTTPResponse, int | None]:
    """A response that begins at `offset`, and the size of the whole file where the server says it."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={offset}-"} if offset else {})
    try:
        response: HTTPResponse = urllib.request.urlopen(request, timeout=timeout_seconds)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (404, 410):
            raise FileNotFoundError(f"HTTP {error.code} {error.reason}") from error
        if 400 <= error.code < 500 and error.code not in (408, 425, 429):
            raise RefusedError(f"HTTP {error.code} {error.reason}") from error
        raise
    length = response.headers.get("Content-Length")
    start = offset if response.status == 206 else 0
    size = start + int(length) if length is not None else None
    while start < offset:  # the server ignores ranges
        chunk = response.read1(min(offset - start, CHUNK_BYTES))
        if not chunk:
            raise ConnectionError(f"ended at byte {start}, before the place to go on from")
        start += len(chunk)
    return response, size


def _open_fsspec(url: str, offset: int) -> tuple[BinaryIO, int | None]:
    filesystem, path = fsspec.core.url_to_fs(url)
    file = filesystem.open(path, "rb", block_size=8 * CHUNK_BYTES, cache_type="readahead")
    file.seek(offset)
    return cast(BinaryIO, file), getattr(file, "size", None)
