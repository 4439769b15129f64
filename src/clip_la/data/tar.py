"""A tar reader for hostile input: bounded, never extracting, losing only what is unreadable.

A member's bytes are bounded before they are read; links and devices are reported, never followed; a
damaged header costs the blocks up to the next valid one; a header that claims more than its member
has is found out by the header inside its bytes; archives joined end to end are read whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from clip_la.data.losses import Cause
from clip_la.data.remote import CHUNK_BYTES
from clip_la.data.storage import ByteStream

BLOCK = 512
ZERO_BLOCK = bytes(BLOCK)
MAX_EXTENDED_HEADER_BYTES = 2**16
MAGIC = b"ustar"
MAGIC_OFFSET = 257
PAX_RECORD = re.compile(rb"(\d{1,9}) ")
PAX_HEADER, GNU_LONG_NAME = b"x", b"L"
EXTENDED_TYPES = (PAX_HEADER, b"g", GNU_LONG_NAME, b"K")
DIRECTORY_TYPE = b"5"
REGULAR_TYPES = (b"0", b"\0", b"7")
TYPES_WITHOUT_DATA = {
    b"1": Cause.LINK,
    b"2": Cause.LINK,
    b"3": Cause.SPECIAL_FILE,
    b"4": Cause.SPECIAL_FILE,
    b"6": Cause.SPECIAL_FILE,
}


@dataclass(frozen=True)
class Member:
    """A regular file of the archive; `data` is b"" where the reader did not ask for it."""

    name: str
    data: bytes


@dataclass(frozen=True)
class BadMember:
    """A member with a readable name that can't be used."""

    name: str
    cause: Cause
    detail: str = ""


@dataclass(frozen=True)
class Damage:
    """A stretch of the archive in which nothing could be read."""

    cause: Cause
    detail: str = ""


@dataclass(frozen=True)
class EndOfArchive:
    """The two zero blocks that end an archive; another may follow."""


Entry = Member | BadMember | Damage | EndOfArchive


@dataclass(frozen=True)
class Header:
    """What one 512-byte header says."""

    name: str
    size: int
    kind: bytes


class _Blocks:
    """Buffered bytes of a stream that can be given back."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._buffer = b""
        self._start = 0

    def take(self, size: int) -> bytes:
        """`size` bytes, fewer only at the end."""
        if len(self._buffer) - self._start < size:
            self._fill(size)
        chunk = self._buffer[self._start : self._start + size]
        self._start += len(chunk)
        return chunk

    def give_back(self, data: bytes) -> None:
        """Put `data` in front of what is still to be read."""
        self._buffer = data + self._buffer[self._start :]
        self._start = 0

    def _fill(self, size: int) -> None:
        chunks = [self._buffer[self._start :]]
        held = len(chunks[0])
        while held < size:
            chunk = self._stream.read(CHUNK_BYTES)
            if not chunk:
                break
            chunks.append(chunk)
            held += len(chunk)
        self._buffer, self._start = b"".join(chunks), 0


class TarReader:
    """Entries of one stream.

    Args:
        stream: where the bytes come from.
        member_limit: for a member's name, the most bytes it may have, or None for a member whose
            bytes aren't wanted.
        scan_bytes: how far a region without a valid header, or of zeros, is searched.
    """

    def __init__(
        self, stream: ByteStream, member_limit: Callable[[str], int | None], scan_bytes: int
    ) -> None:
        self._blocks = _Blocks(stream)
        self._member_limit = member_limit
        self._scan_bytes = scan_bytes
        self._num_headers = 0
        self._num_zero_blocks = 0
        self._found_damage = False
        self._gave_up = False
        self._next_name: str | None = None
        self._next_size: int | None = None

    def __iter__(self) -> Iterator[Entry]:
        """Members in order, and whatever is wrong with the archive where it is found."""
        while not self._gave_up:
            block = self._blocks.take(BLOCK)
            if len(block) < BLOCK:
                yield from self._end(block)
                return
            if block == ZERO_BLOCK:
                yield from self._zero_block()
            elif (header := parse_header(block)) is not None:
                yield from self._entry(header)
            else:
                yield self._resynchronise()

    def _end(self, rest: bytes) -> Iterator[Entry]:
        is_zero = not rest.strip(b"\0")
        if not self._num_headers:
            if not is_zero:
                yield Damage(Cause.SHARD_NOT_A_TAR, f"{len(rest)} bytes")
            elif not self._found_damage:
                yield Damage(Cause.SHARD_EMPTY, "no members" if self._num_zero_blocks else "zero-length")
        elif not is_zero:
            yield Damage(Cause.SHARD_TRUNCATED, f"cut {len(rest)} bytes into a header")
        elif not self._num_zero_blocks:
            yield Damage(Cause.SHARD_TRUNCATED, "no end-of-archive mark")

    def _zero_block(self) -> Iterator[Entry]:
        self._forget_extended()
        self._num_zero_blocks += 1
        if self._num_zero_blocks == 2:
            yield EndOfArchive()
        if self._num_zero_blocks * BLOCK > self._scan_bytes:
            self._gave_up = True
            yield Damage(Cause.BAD_HEADER, f"{self._scan_bytes} zero bytes; the rest was not read")

    def _resynchronise(self) -> Damage:
        """Go to the next valid header, or to the end."""
        skipped = BLOCK
        self._forget_extended()
        self._found_damage = True
        self._num_zero_blocks = 0
        while chunk := self._blocks.take(CHUNK_BYTES):
            at = find_header(chunk)
            if at is not None:
                self._blocks.give_back(chunk[at:])
                return Damage(Cause.BAD_HEADER, f"{skipped + at} bytes skipped")
            skipped += len(chunk)
            self._num_zero_blocks = (len(chunk) - len(chunk.rstrip(b"\0"))) // BLOCK
            if skipped > self._scan_bytes:
                self._gave_up = True
                break
        if self._num_headers:
            return Damage(Cause.BAD_HEADER, f"{skipped} bytes skipped; no header follows")
        return Damage(Cause.SHARD_NOT_A_TAR, f"no header in {skipped} bytes")

    def _entry(self, header: Header) -> Iterator[Entry]:
        if self._num_zero_blocks == 1:
            yield Damage(Cause.BAD_HEADER, "a block of zeros in place of a header")
        self._num_headers += 1
        self._num_zero_blocks = 0
        if header.kind in EXTENDED_TYPES:
            yield from self._extended(header)
            return
        name = self._next_name if self._next_name is not None else header.name
        size = self._next_size if self._next_size is not None else header.size
        self._forget_extended()
        if header.kind in TYPES_WITHOUT_DATA:
            yield BadMember(name, TYPES_WITHOUT_DATA[header.kind], f"tar type {header.kind.decode()}")
        elif header.kind in REGULAR_TYPES and not name.endswith("/"):
            yield self._file(name, size)
        elif header.kind not in (DIRECTORY_TYPE, *REGULAR_TYPES):
            yield self._skip(name, size) or BadMember(name, Cause.SPECIAL_FILE, f"tar type {header.kind!r}")

    def _forget_extended(self) -> None:
        """What an extended header said was of the one member behind it, read or lost."""
        self._next_name = self._next_size = None

    def _file(self, name: str, size: int) -> Entry:
        limit = self._member_limit(name)
        if limit is None:
            return self._skip(name, size) or Member(name, b"")
        if size > limit:
            self._skip(name, size, may_be_nested=False)
            return BadMember(name, Cause.MEMBER_TOO_LARGE, f"{size:,} bytes, limit {limit:,}")
        data = self._blocks.take(_padded(size))
        return self._check_data(name, size, data) or Member(name, data[:size])

    def _skip(self, name: str, size: int, may_be_nested: bool = True) -> BadMember | None:
        """Pass over a member's bytes in bounded memory; what is wrong with them, if anything.

        A member that begins with a header is an archive of its own, and not looked into.
        """
        left, is_nested = _padded(size), False
        while left > 0:
            length = min(left, CHUNK_BYTES)
            data = self._blocks.take(length)
            if left == _padded(size):
                is_nested = may_be_nested and find_header(data[:BLOCK]) == 0
            bad = self._check_data(name, length, data, is_nested)
            if bad is not None:
                return bad
            left -= length
        return None

    def _check_data(self, name: str, size: int, data: bytes, is_nested: bool = False) -> BadMember | None:
        at = None if is_nested else find_header(data)
        if at is not None:
            self._blocks.give_back(data[at:])
            return BadMember(name, Cause.BAD_SIZE, f"another header follows after {at} of its {size} bytes")
        if len(data) < size:
            return BadMember(name, Cause.MEMBER_TRUNCATED, f"{len(data):,} of {size:,} bytes")
        return None

    def _extended(self, header: Header) -> Iterator[Entry]:
        """A PAX or GNU header that says more about the next member than its own header can."""
        if header.size > MAX_EXTENDED_HEADER_BYTES:
            bad = self._skip(header.name, header.size, may_be_nested=False)
            self._forget_extended()
            yield bad or BadMember(header.name, Cause.MEMBER_TOO_LARGE, f"header of {header.size:,} bytes")
            return
        data = self._blocks.take(_padded(header.size))
        if (bad := self._check_data(header.name, header.size, data)) is not None:
            self._forget_extended()
            yield bad
        elif header.kind == GNU_LONG_NAME:
            self._next_name = _text(data[: header.size])
        elif header.kind == PAX_HEADER:
            records = _pax_records(data[: header.size])
            self._next_name = records.get("path", self._next_name)
            self._next_size = _decimal(records.get("size"))


def find_header(data: bytes) -> int | None:
    """Where the first valid header on a 512-byte boundary of `data` begins."""
    at = data.find(MAGIC, MAGIC_OFFSET)
    while at >= 0:
        start = -(-(at - MAGIC_OFFSET) // BLOCK) * BLOCK
        block = data[start : start + BLOCK]
        if len(block) == BLOCK and block.startswith(MAGIC, MAGIC_OFFSET) and parse_header(block):
            return start
        at = data.find(MAGIC, start + MAGIC_OFFSET + 1)
    return None


def parse_header(block: bytes) -> Header | None:
    """The header in 512 bytes, or None where the checksum or the size is not valid."""
    checksum, size = _number(block[148:156]), _number(block[124:136])
    if checksum is None or size is None or size < 0:
        return None
    if checksum != 256 + sum(block[:148]) + sum(block[156:]):
        return None
    name = _text(block[:100])
    if block.startswith(b"ustar\0", MAGIC_OFFSET) and block[345]:
        name = _text(block[345:500]) + "/" + name
    return Header(name, size, block[156:157])


def _number(field: bytes) -> int | None:
    """A tar number: octal digits, or base 256 where the first bit is set."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip()
    try:
        return int(digits or b"0", 8) if digits.isdigit() or not digits else None
    except ValueError:
        return None


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")


def _pax_records(data: bytes) -> dict[str, str]:
    """Records "LENGTH KEY=VALUE\\n"; reading stops at the first that is malformed."""
    records: dict[str, str] = {}
    while match := PAX_RECORD.match(data):
        length = int(match[1])
        record = data[match.end() : length]
        if not match.end() < length <= len(data) or b"=" not in record:
            break
        key, value = record.rstrip(b"\n").split(b"=", 1)
        records[_text(key)] = _text(value)
        data = data[length:]
    return records


def _decimal(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 20 else None


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
