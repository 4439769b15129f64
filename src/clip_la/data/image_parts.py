"""Pictures that would keep a decoder busy out of all proportion to their size.

Pillow goes through the segments of a JPEG and the chunks of a PNG one by one and keeps them, and libjpeg
goes over the whole picture for each scan: a few megabytes of tiny parts cost minutes and gigabytes, or days.
"""

from __future__ import annotations

MAX_PARTS = 10_000  # a 64 MiB PNG in libpng's chunks of 8 KiB has 8,192
MAX_SCANS = 100  # progressive files have about ten
JPEG_START, PNG_START = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
JPEG_SCAN = b"\xff\xda"
CHUNK_OVERHEAD = 12  # length, kind and checksum


def find_excess_parts(data: bytes) -> str | None:
    """Of what a JPEG or PNG file has too many; None where nothing is, or for another format."""
    if data.startswith(JPEG_START):
        if data.count(JPEG_SCAN) > MAX_SCANS:
            return f"more than {MAX_SCANS} scans"
        return _excess(_count_segments(data), "segments")
    if data.startswith(PNG_START):
        return _excess(_count_chunks(data), "chunks")
    return None


def _excess(count: int, what: str) -> str | None:
    return f"more than {MAX_PARTS:,} {what}" if count > MAX_PARTS else None


def _count_segments(data: bytes) -> int:
    """Segments and fill bytes before the first scan, counted up to the limit."""
    at, count = len(JPEG_START), 0
    while count <= MAX_PARTS and (at := data.find(b"\xff", at)) >= 0 and not data.startswith(JPEG_SCAN, at):
        count += 1
        is_fill = data[at + 1 : at + 2] == b"\xff"
        at += 1 if is_fill else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return count


def _count_chunks(data: bytes) -> int:
    at, count = len(PNG_START), 0
    while count <= MAX_PARTS and at + CHUNK_OVERHEAD <= len(data):
        count += 1
        at += CHUNK_OVERHEAD + int.from_bytes(data[at : at + 4], "big")
    return count
