"""Damage in JPEG files that decoders pass over: libjpeg only warns, and Pillow doesn't pass that on.

Inside a scan 0xFF is followed by 0x00 or a restart marker; only the marker of another segment ends it.
Damage that keeps to this rule decodes to a picture and can't be told from one. A picture that claims more
pixels than its bytes can hold would be filled up with grey.
"""

from __future__ import annotations

import re

START_OF_SCAN, END_OF_IMAGE = 0xDA, 0xD9
SCAN_END = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
HUFFMAN_FRAMES = frozenset((0xC0, 0xC1, 0xC2))  # baseline, extended, progressive
# Tables, comments, application data and further scans may follow a scan.
MARKERS_AFTER_SCAN = frozenset((0xC4, START_OF_SCAN, 0xDB, 0xDC, 0xDD, 0xFE, *range(0xE0, 0xF0)))


def find_jpeg_damage(data: bytes) -> str | None:
    """What is wrong with the scans of a JPEG file; None where nothing is, or for another format."""
    at, seen_scan = 2, False
    while data.startswith(b"\xff\xd8") and at + 4 <= len(data):
        if data[at] != 0xFF:
            return f"byte {data[at]:#04x} at {at} in place of a marker" if seen_scan else None
        marker = data[at + 1]
        if marker == END_OF_IMAGE:
            return None
        if marker in HUFFMAN_FRAMES and (excess := _find_missing_bytes(data, at)) is not None:
            return excess
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == START_OF_SCAN:
            seen_scan = True
            match = SCAN_END.search(data, at)
            if match is None:
                return None
            marker, at = data[match.start() + 1], match.start()
            if marker != END_OF_IMAGE and marker not in MARKERS_AFTER_SCAN:
                return f"marker {marker:#04x} at {at} inside a scan"
    return None


def _find_missing_bytes(data: bytes, frame: int) -> str | None:
    """Whether the file is too short for the frame's size: each block of 8 x 8 pixels takes a bit at least."""
    height, width = (int.from_bytes(data[at : at + 2], "big") for at in (frame + 5, frame + 7))
    num_blocks = -(-height // 8) * -(-width // 8)
    if num_blocks > 8 * len(data):
        return f"{len(data):,} bytes can't hold {width} x {height} pixels"
    return None
