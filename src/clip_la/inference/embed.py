"""`clip-la embed`: images and texts to embeddings, part by part; run again, it goes on where it stopped."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from clip_la.bundle import ClipBundle
from clip_la.config import ConfigError
from clip_la.data.losses import Loss, LossCounter, describe
from clip_la.evaluate.cache import hash_of_model
from clip_la.evaluate.features import progress, refuse_non_finite
from clip_la.inference.parts import Done, Part, PartFolder
from clip_la.inference.rows import Position, Row, RowReader
from clip_la.inference.sources import TextLines, Units, open_images
from clip_la.model_choice import ModelChoice, add_model_arguments, load_model

Dtype = Literal["float16", "float32"]
CAPTIONS = "captions"
_EXAMPLES = """examples:
  clip-la embed logs/my-run --images photos/ --out embeddings
  clip-la embed hub/my-model --images 'laion/{00000..00099}.tar' --texts captions --out embeddings
  clip-la embed --model ViT-B-32 --pretrained openai --texts queries.txt --out queries --dtype float32

writes, row by row the same samples:
  img_emb/img_emb_0.npy           (rows, embed_dim), L2-normalised
  text_emb/text_emb_0.npy         the same of the captions
  metadata/metadata_0.parquet     image_path, caption; of shards also shard, url, json
  unusable/unusable_0.jsonl       what was dropped, and why"""


@dataclass(frozen=True)
class EmbedOptions:
    """What `clip-la embed` is told beside the model; see `add_arguments` for the meanings."""

    out: Path
    images: str | None = None
    texts: str | None = None
    dtype: Dtype = "float16"
    batch_size: int = 64
    workers: int = 2
    rows_per_file: int = 100_000

    def __post_init__(self) -> None:
        if self.images is None and self.texts in (None, CAPTIONS):
            raise ConfigError(
                "nothing to embed: give --images FOLDER|SHARDS, --texts FILE, or both a source and texts"
            )
        if self.images is not None and self.texts not in (None, CAPTIONS):
            raise ConfigError(
                f"--texts {self.texts} with --images: a file's lines belong to no image; embed them into "
                "another --out, or give --texts captions for the images' own captions"
            )
        if min(self.batch_size, self.rows_per_file) < 1 or self.workers < 0:
            raise ConfigError("--batch-size and --rows-per-file must be at least 1, --workers at least 0")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> EmbedOptions:
        """What the command line says."""
        return cls(**{name: getattr(args, name) for name in cls.__dataclass_fields__})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command: the model, and `EmbedOptions`."""
    parser.description = f"{parser.description}\n\n{_EXAMPLES}"
    add_model_arguments(parser, positional=True)
    add = parser.add_argument
    add("--device", default="auto", help="auto, cuda or cpu (default: %(default)s)")
    add(
        "--images",
        metavar="FOLDER|SHARDS",
        help="images at any depth of a folder, or shards: 'dir/{00000..00099}.tar', or a folder of them",
    )
    add(
        "--texts",
        metavar="captions|FILE",
        help="`captions`: embed each image's own too (its .txt; images without one are dropped and counted); "
        "or a file with one text a line, without --images",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="folder to fill; run again to go on")
    add("--dtype", choices=get_args(Dtype), default=EmbedOptions.dtype, help="default: %(default)s")
    add("--batch-size", type=int, default=EmbedOptions.batch_size, help="default: %(default)s")
    add("--workers", type=int, default=EmbedOptions.workers, help="decoding threads (default: %(default)s)")
    add(
        "--rows-per-file",
        type=int,
        default=EmbedOptions.rows_per_file,
        help="also what is held in memory, and lost by a kill (default: %(default)s)",
    )


@dataclass(frozen=True)
class EmbedReport:
    """What the folder holds, all starts together.

    Attributes:
        num_rows, num_parts: embeddings (of each kind), and files.
        num_kept_parts: of earlier starts.
        losses: cause -> what was dropped.
        examples: the first of each cause in this start.
    """

    out: Path
    num_rows: int
    num_parts: int
    num_kept_parts: int
    losses: dict[str, int]
    examples: tuple[Loss, ...]

    def __str__(self) -> str:
        kept = f", {self.num_kept_parts} of them from an earlier start" if self.num_kept_parts else ""
        text = f"{self.num_rows:,} embedded in {self.num_parts} part(s){kept}: {self.out}"
        if self.losses:
            text += f"\n{sum(self.losses.values()):,} not usable: {describe(self.losses, self.examples)}"
            text += f"\nall of them by name: {self.out / 'unusable'}"
        return text


def embed(bundle: ClipBundle, options: EmbedOptions) -> EmbedReport:
    """Embed everything that isn't embedded yet.

    Raises:
        ValueError: the source or the folder can't be used, or nothing in the source could be embedded.
        OSError: a part can't be written; those before it are kept.
    """
    if find_spec("pyarrow") is None:
        raise ValueError("the metadata needs pyarrow: pip install 'clip_la[embed]'")
    units = _open(options)
    folder = PartFolder(options.out, _settings(bundle, options, units))
    done = folder.done()
    num_kept = len(done)
    found = LossCounter()
    for part, after in _parts(bundle, options, units, done[-1].next if done else Position()):
        done.append(folder.write(len(done), part, after))
        for loss in part.unusable:
            found.add(loss)
    report = _report(options.out, done, num_kept, found)
    if not report.num_rows:
        raise ValueError(
            f"nothing in {units.name} could be embedded: {describe(report.losses, report.examples)}"
        )
    return report


def _open(options: EmbedOptions) -> Units:
    return open_images(options.images) if options.images is not None else TextLines(Path(str(options.texts)))


def _settings(bundle: ClipBundle, options: EmbedOptions, units: Units) -> dict[str, Any]:
    """Whatever the bytes of the parts depend on."""
    return {
        "model": bundle.model_name,
        "model_hash": hash_of_model(bundle)[:16],
        "source": units.name,
        "source_hash": units.hash(),
        "texts": options.texts,
        "dtype": options.dtype,
        "embed_dim": bundle.model_config["embed_dim"],
        "batch_size": options.batch_size,
        "rows_per_file": options.rows_per_file,
    }


def _report(out: Path, done: list[Done], num_kept: int, found: LossCounter) -> EmbedReport:
    losses: Counter[str] = Counter()
    for part in done:
        losses.update(part.losses)
    num_rows = sum(part.num_rows for part in done)
    num_parts = sum(part.num_rows > 0 for part in done)
    return EmbedReport(
        out, num_rows, num_parts, num_kept, dict(sorted(losses.items())), tuple(found.first.values())
    )


def _parts(
    bundle: ClipBundle, options: EmbedOptions, units: Units, start: Position
) -> Iterator[tuple[Part, Position]]:
    """Parts from `start` on, and the position after each."""
    reader = RowReader(
        units,
        bundle,
        with_images=options.images is not None,
        with_captions=options.texts is not None,
        workers=options.workers,
    )
    encoder = _Encoder(bundle, options, reader, units.columns)
    part, after, waiting = encoder.new_part(), start, list[Row]()
    for after, item in progress(reader.rows(start), "embedding", units.num_samples):
        if isinstance(item, Loss):
            part.unusable.append(item)
            continue
        waiting.append(item)
        is_full = part.num_rows + len(waiting) == options.rows_per_file
        if is_full or len(waiting) == options.batch_size:
            encoder.add(part, waiting)
            waiting = []
        if is_full:
            yield part, after
            part = encoder.new_part()
    if waiting:
        encoder.add(part, waiting)
    if part.num_rows or part.unusable:
        yield part, after


class _Encoder:
    """Rows to embeddings."""

    def __init__(
        self, bundle: ClipBundle, options: EmbedOptions, reader: RowReader, columns: tuple[str, ...]
    ) -> None:
        self._bundle = bundle
        self._dtype = getattr(torch, options.dtype)
        self._stack = reader.stack
        self._columns = (*columns, "caption")
        self._with_images = options.images is not None
        self._with_texts = options.texts is not None

    def new_part(self) -> Part:
        """A part without rows."""
        names = ["img_emb"] * self._with_images + ["text_emb"] * self._with_texts
        return Part({name: [] for name in names}, {column: [] for column in self._columns})

    def add(self, part: Part, rows: list[Row]) -> None:
        """Embed a batch and add it to a part."""
        if self._with_images:
            features = self._bundle.encode_image(self._stack(rows))
            part.arrays["img_emb"].append(self._to_numpy(features, "image"))
        if self._with_texts:
            tokens = self._bundle.tokenizer([row.caption or "" for row in rows])
            part.arrays["text_emb"].append(self._to_numpy(self._bundle.encode_text(tokens), "text"))
        for row in rows:
            for column, value in {**row.metadata, "caption": row.caption}.items():
                part.metadata[column].append(value)
        part.num_rows += len(rows)

    def _to_numpy(self, features: torch.Tensor, what: str) -> npt.NDArray[np.floating[Any]]:
        array: npt.NDArray[np.floating[Any]] = (
            refuse_non_finite(features, what).to("cpu", self._dtype).numpy()
        )
        return array


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    options = EmbedOptions.from_args(args)
    print(embed(load_model(ModelChoice.from_args(args), args.device), options))
    return 0
