"""Shards that are compressed: gzip is read, other formats are recognised and refused by name."""

from __future__ import annotations

import zlib

from clip_la.data.remote import CHUNK_BYTES
from clip_la.data.storage import ByteStream

GZIP_MAGIC = b"\x1f\x8b"
REFUSED = {b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4"}
GZIP_WINDOW = 16 + zlib.MAX_WBITS


class CompressionError(OSError):
    """A compression format that is not read."""


def decompressed(stream: ByteStream) -> ByteStream:
    """`stream` itself, or what it holds where it is gzip-compressed.

    Raises:
        CompressionError: bzip2, xz, zstd or lz4.
    """
    start = b""
    while len(start) < 6 and (chunk := stream.read(CHUNK_BYTES)):
        start += chunk
    for magic, name in REFUSED.items():
        if start.startswith(magic):
            raise CompressionError(f"compressed with {name}; only plain and gzip-compressed tars are read")
    plain = _Prefixed(start, stream)
    return GunzipStream(plain) if start.startswith(GZIP_MAGIC) else plain


class _Prefixed:
    def __init__(self, start: bytes, rest: ByteStream) -> None:
        self._start = start
        self._rest = rest

    def read(self, size: int, /) -> bytes:
        """The bytes that were looked at first, then the rest."""
        if self._start:
            chunk, self._start = self._start[:size], self._start[size:]
            return chunk
        return self._rest.read(size)


class GunzipStream:
    """One or more gzip members, decompressed piece by piece.

    A read gives what could be decompressed before it raises, so nothing in front of damage is lost.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._decompressor = zlib.decompressobj(GZIP_WINDOW)
        self._pending = b""

    def read(self, size: int, /) -> bytes:
        """Up to `size` decompressed bytes; b"" at the end.

        Raises:
            OSError: cut short, or not valid gzip data.
        """
        while True:
            if self._decompressor.eof:
                self._pending = self._decompressor.unused_data
                self._decompressor = zlib.decompressobj(GZIP_WINDOW)
                at_member_start = True
            else:
                at_member_start = False
            self._pending = self._pending or self._stream.read(CHUNK_BYTES)
            if not self._pending:
                if at_member_start:
                    return b""
                raise OSError("the gzip data is cut short")
            try:
                data = self._decompressor.decompress(self._pending, size)
            except zlib.error as error:
                raise OSError(f"the gzip data is damaged: {error}") from error
            self._pending = self._decompressor.unconsumed_tail
            if data:
                return data
