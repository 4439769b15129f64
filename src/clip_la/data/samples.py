"""Image-text pairs of one shard, still undecoded: members grouped by key, never across shards.

A member belongs to the key before the first dot of its file name, folders included, as in
webdataset; what follows the dot, in lower case, says what it is. Members of one key follow each
other. Where a key has two images the one that comes first in IMAGE_SUFFIXES is used, as in OpenCLIP;
a suffix that comes again begins a new sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from clip_la.data.compression import CompressionError, decompressed
from clip_la.data.losses import Cause, Loss
from clip_la.data.spec import Limits
from clip_la.data.storage import NotAFileError, OpenOptions, open_stream
from clip_la.data.tar import BadMember, Damage, EndOfArchive, Entry, Member, TarReader

IMAGE_SUFFIXES = ("jpg", "png", "jpeg", "webp")
TEXT_SUFFIX = "txt"
METADATA_SUFFIX = "json"
CHECKED_SUFFIXES = (*IMAGE_SUFFIXES, METADATA_SUFFIX)  # read, so that a lying size is found out
MEMBER_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)


@dataclass(frozen=True)
class RawSample:
    """An image and its caption (or label) as the bytes in which they were stored.

    Attributes:
        metadata: img2dataset's .json; only where it was asked for.
    """

    shard: str
    key: str
    image: bytes
    text: bytes
    metadata: bytes = b""

    @property
    def num_bytes(self) -> int:
        """Bytes held, for bounding a block."""
        return len(self.key) + len(self.image) + len(self.text) + len(self.metadata)


def read_shard(
    url: str,
    limits: Limits,
    options: OpenOptions,
    text_suffix: str = TEXT_SUFFIX,
    *,
    images_alone: bool = False,
) -> Iterator[RawSample | Loss]:
    """Every complete pair of a shard in order, and a Loss for whatever is not one; never raises OSError.

    Args:
        text_suffix: of the member that goes with the image: "txt" for captions, "cls" for labels.
        images_alone: an image needs no text (it is b"" then), and samples have their metadata.
    """
    return group_entries(_read_entries(url, limits, options, text_suffix), url, text_suffix, images_alone)


def _read_entries(url: str, limits: Limits, options: OpenOptions, text_suffix: str) -> Iterator[Entry]:
    def member_limit(name: str) -> int | None:
        """Bytes that a member of this name may have; None for one that is never read."""
        _, suffix = split_name(name)
        if suffix == text_suffix:
            return limits.caption_bytes
        return limits.member_bytes if suffix in CHECKED_SUFFIXES else None

    try:
        with open_stream(url, options) as stream:
            yield from TarReader(decompressed(stream), member_limit, limits.scan_bytes)
    except FileNotFoundError as error:
        yield Damage(Cause.SHARD_MISSING, error.strerror or str(error))
    except NotAFileError as error:
        yield Damage(Cause.SHARD_NOT_A_TAR, str(error))
    except CompressionError as error:
        yield Damage(Cause.SHARD_COMPRESSED, str(error))
    except (OSError, ValueError) as error:  # ValueError: no such path can exist
        yield Damage(Cause.SHARD_UNREADABLE, str(error))


def split_name(name: str) -> tuple[str | None, str]:
    """Key and lower-case suffix of a member's name; no key where the name has none."""
    match = MEMBER_NAME.fullmatch(name)
    return (match[1], match[2].lower()) if match else (None, "")


def group_entries(
    entries: Iterator[Entry], shard: str, text_suffix: str = TEXT_SUFFIX, images_alone: bool = False
) -> Iterator[RawSample | Loss]:
    """Group the entries of one shard into samples."""
    group: _Group | None = None
    for entry in entries:
        if isinstance(entry, Damage):
            yield Loss(entry.cause, shard, None, entry.detail)
            continue
        if isinstance(entry, EndOfArchive):
            key, suffix = None, ""
        else:
            key, suffix = split_name(entry.name)
            if key is None:
                yield _nameless(entry, shard)
                continue
        if group is not None and not (group.key == key and suffix not in group.members):
            yield from group.finish(shard)
            group = None
        if key is not None and not isinstance(entry, EndOfArchive):
            group = group or _Group(key, text_suffix, images_alone)
            group.add(suffix, entry)
    if group is not None:
        yield from group.finish(shard)


def _nameless(entry: Member | BadMember, shard: str) -> Loss:
    if isinstance(entry, BadMember):
        return Loss(entry.cause, shard, entry.name, entry.detail)
    return Loss(Cause.BAD_NAME, shard, entry.name, "expected KEY.SUFFIX")


@dataclass
class _Group:
    """Members of one key, so far."""

    key: str
    text_suffix: str
    images_alone: bool = False
    metadata: bytes = b""
    members: dict[str, bytes | None] = field(default_factory=dict)  # of the suffixes in use; None: bad
    others: list[str] = field(default_factory=list)
    bad: BadMember | None = None

    def add(self, suffix: str, entry: Member | BadMember) -> None:
        """Take in a member of the sample."""
        if isinstance(entry, BadMember):
            self.bad = self.bad or entry
        if suffix == self.text_suffix or suffix in IMAGE_SUFFIXES:
            self.members[suffix] = entry.data if isinstance(entry, Member) else None
            return
        if self.images_alone and suffix == METADATA_SUFFIX and isinstance(entry, Member):
            self.metadata = entry.data
        if len(self.others) < 4:
            self.others.append(suffix)

    def finish(self, shard: str) -> Iterator[RawSample | Loss]:
        """The sample, or why there is none, and what was lost beside it."""
        images = [data for suffix in IMAGE_SUFFIXES if (data := self.members.get(suffix)) is not None]
        text = self.members.get(self.text_suffix, b"" if self.images_alone else None)
        if images and text is not None:
            yield RawSample(shard, self.key, images[0], text, self.metadata)
            if len(images) > 1:
                yield Loss(Cause.EXTRA_IMAGE, shard, self.key, f"{len(images)} images")
            if self.bad is not None:
                yield Loss(self.bad.cause, shard, self.bad.name, self.bad.detail)
        elif self.bad is not None:
            yield Loss(self.bad.cause, shard, self.key, f"{self.bad.name}: {self.bad.detail}")
        else:
            found = ", ".join("." + suffix for suffix in (*self.members, *self.others))
            yield Loss(self._what_is_missing(bool(images)), shard, self.key, f"has only {found}")

    def _what_is_missing(self, has_image: bool) -> Cause:
        if not has_image:
            return Cause.NO_IMAGE
        return Cause.NO_TEXT if self.text_suffix == TEXT_SUFFIX else Cause.NO_LABEL
