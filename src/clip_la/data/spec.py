"""What to read and how, as one frozen value; and the limits that keep hostile input harmless."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from clip_la.data.storage import OpenOptions

DatasetType = Literal["webdataset", "csv", "auto"]
MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """What a shard may ask of this process; whatever exceeds it is dropped and counted.

    Decoding one sample takes at most about 8 bytes a pixel and twice the member, so 640 MiB with
    these defaults, and that only for a picture that comes close to both limits.

    Attributes:
        member_bytes: largest image, checked before it is read.
        caption_bytes: largest text member, checked before it is read.
        caption_chars: a longer caption is cut here before the tokenizer, whose time grows with the
            square of a word's length. At 26 characters a token this is CLIP's whole context.
        pixels: largest width * height, checked before decoding.
        aspect_ratio: largest longer side / shorter side.
        scan_bytes: how far a damaged or zero-filled region is searched for the next header before
            the rest of the shard is given up.
    """

    member_bytes: int = 64 * MIB
    caption_bytes: int = 1 * MIB
    caption_chars: int = 2048
    pixels: int = 64 * MIB
    aspect_ratio: float = 100.0
    scan_bytes: int = 1024 * MIB

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not value >= 1:
                raise ValueError(f"limit {limit.name} is {value!r}; expected at least 1")


@dataclass(frozen=True)
class DataSpec:
    """A training set and the order in which one rank reads it.

    Attributes:
        train_data: shards, as "a/{00000..00007}.tar::b/*.tar", or a CSV/TSV file.
        batch_size: samples a batch of this rank.
        dataset_type: "webdataset", "csv", or "auto": by the name's ending.
        num_samples: samples in a virtual epoch, over all ranks; None: from sizes.json or
            *_stats.json beside the shards, or the table's rows.
        seed: of the order and of random augmentation.
        rank, world_size: this process among those that share the data.
        workers: reading processes; 0 reads in the training process.
        shuffle_block: raw samples that are shuffled together.
        shuffle_bytes: a block ends early here; a worker holds at most two blocks.
        resampled: draw shards with replacement (OpenCLIP's --dataset-resampled).
        upsampling_factors: weights of the "::" parts of `train_data`, as "2::1"; needs `resampled`.
        csv_img_key, csv_caption_key, csv_separator: columns of a table, as OpenCLIP's flags.
        empty_caption: "drop" (and count) captions without text, or "keep" them.
        exif_orientation: turn pictures as their EXIF tag says; OpenCLIP doesn't.
        background: colour under transparent pictures.
        allow_pipe: permit "pipe:COMMAND" shards, which run a shell command.
        retries: how often a remote read is tried again before the rest of the shard is given up.
        timeout_seconds: how long a remote read may make no progress.
        start_method: of the workers: "fork", "spawn", "forkserver", or None for the platform's.
        pin_memory: put batches in page-locked memory, for faster copies to a GPU.
    """

    train_data: str
    batch_size: int
    dataset_type: DatasetType = "auto"
    num_samples: int | None = None
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    workers: int = 0
    shuffle_block: int = 5000
    shuffle_bytes: int = 256 * MIB
    resampled: bool = False
    upsampling_factors: str | None = None
    csv_img_key: str = "filepath"
    csv_caption_key: str = "title"
    csv_separator: str = "\t"
    empty_caption: Literal["drop", "keep"] = "drop"
    exif_orientation: bool = False
    background: tuple[int, int, int] = (255, 255, 255)
    allow_pipe: bool = False
    retries: int = 5
    timeout_seconds: float = 30.0
    start_method: Literal["fork", "spawn", "forkserver"] | None = None
    pin_memory: bool = False
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("seed", 0), ("workers", 0), ("shuffle_block", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least {least}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank is {self.rank}; expected 0 <= rank < world_size = {self.world_size}")
        if self.num_samples is not None and self.num_samples < 1:
            raise ValueError(f"num_samples is {self.num_samples}; expected at least 1")
        if self.dataset_type not in ("webdataset", "csv", "auto"):
            raise ValueError(f"dataset type is {self.dataset_type!r}; expected webdataset, csv or auto")
        if self.empty_caption not in ("drop", "keep"):
            raise ValueError(f"empty_caption is {self.empty_caption!r}; expected drop or keep")
        if self.upsampling_factors is not None and not self.resampled:
            raise ValueError(
                "upsampling factors only have a meaning with resampled data (--dataset-resampled)"
            )

    @property
    def open_options(self) -> OpenOptions:
        """How its files are opened."""
        return OpenOptions(self.retries, self.timeout_seconds, self.allow_pipe)

    @property
    def num_readers(self) -> int:
        """Processes that read for one rank: the workers, or the training process itself."""
        return max(1, self.workers)
