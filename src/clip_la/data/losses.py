"""Why a sample, a member or a shard could not be used, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum


class Cause(str, Enum):
    """Every cause of loss, by the name that counters, metrics and `clip-la check` use."""

    # A whole shard, or the rest of it.
    SHARD_MISSING = "shard_missing"
    SHARD_UNREADABLE = "shard_unreadable"
    SHARD_EMPTY = "shard_empty"
    SHARD_NOT_A_TAR = "shard_not_a_tar"
    SHARD_COMPRESSED = "shard_compressed"
    SHARD_TRUNCATED = "shard_truncated"
    # A region or a member of a shard.
    BAD_HEADER = "bad_header"
    BAD_SIZE = "bad_size"
    BAD_NAME = "bad_name"
    MEMBER_TRUNCATED = "member_truncated"
    MEMBER_TOO_LARGE = "member_too_large"
    LINK = "link"
    SPECIAL_FILE = "special_file"
    EXTRA_IMAGE = "extra_image"
    # A sample.
    NO_IMAGE = "no_image"
    NO_TEXT = "no_text"
    NO_LABEL = "no_label"
    BAD_ROW = "bad_row"
    IMAGE_UNREADABLE = "image_unreadable"
    IMAGE_EMPTY = "image_empty"
    IMAGE_FORMAT = "image_format"
    IMAGE_CORRUPT = "image_corrupt"
    IMAGE_TOO_MANY_PIXELS = "image_too_many_pixels"
    IMAGE_TOO_MANY_PARTS = "image_too_many_parts"
    IMAGE_ASPECT_RATIO = "image_aspect_ratio"
    IMAGE_TRANSFORM = "image_transform"
    TEXT_EMPTY = "text_empty"
    TEXT_ENCODING = "text_encoding"
    TEXT_SPECIAL_TOKEN = "text_special_token"
    TEXT_TOKENIZER = "text_tokenizer"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Loss:
    """One thing that could not be used.

    Attributes:
        cause: why.
        shard: the shard's URL, or the table's path.
        key: the sample's key, the member's name or the row's number; None for a whole shard.
        detail: what was found, for people.
    """

    cause: Cause
    shard: str
    key: str | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        if self.key is not None:
            object.__setattr__(self, "key", printable(self.key))
        object.__setattr__(self, "detail", printable(self.detail))

    def __str__(self) -> str:
        where = self.shard if self.key is None else f"{self.shard}: {self.key}"
        return f"{self.cause} in {where}" + (f" ({self.detail})" if self.detail else "")

    def to_dict(self) -> dict[str, str | None]:
        """The same as a JSON-safe dict."""
        return {**asdict(self), "cause": self.cause.value}


def printable(text: str, limit: int = 200) -> str:
    """`text` as one short line that can't steer a terminal: names come from shards."""
    short = text if len(text) <= limit else text[:limit] + "..."
    return short if short.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in short)


class LossCounter:
    """Counts by cause, and the first loss of each cause; bounded memory however many are added."""

    def __init__(self) -> None:
        self.counts: Counter[Cause] = Counter()
        self.first: dict[Cause, Loss] = {}

    def add(self, loss: Loss) -> None:
        """Count one loss."""
        self.counts[loss.cause] += 1
        self.first.setdefault(loss.cause, loss)

    def merge(self, other: LossCounter) -> None:
        """Add everything that `other` counted."""
        self.counts.update(other.counts)
        for cause, loss in other.first.items():
            self.first.setdefault(cause, loss)

    def __len__(self) -> int:
        return self.counts.total()

    def to_counts(self) -> dict[str, int]:
        """Counts by the cause's name."""
        return {cause.value: count for cause, count in sorted(self.counts.items())}


def describe(counts: Mapping[str, int], first: Iterable[Loss] = ()) -> str:
    """Counts by cause on one line, with the first example of each cause on lines of their own."""
    summary = ", ".join(f"{count} {cause}" for cause, count in counts.items()) or "no losses"
    return "\n".join([summary, *(f"  first {loss}" for loss in first)])
