"""Images with any number of captions each: a CSV or TSV file, a COCO or Karpathy JSON file, or shards.

.csv, .tsv   a row a caption: an image column (image, filepath, file_name, filename) and a caption column
             (caption, title, text, sentence); rows of one image belong together
.json        COCO's captions_val2017.json, or Karpathy's dataset_coco.json and dataset_flickr30k.json
shards       `KEY.jpg` with `KEY.txt`, a caption a line
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clip_la.evaluate import ranks
from clip_la.evaluate.classes import read_text
from clip_la.evaluate.images import ImageReader, RawImage
from clip_la.evaluate.shards import NumberedShards, find_shards

_IMAGE_COLUMNS = ("filepath", "image", "file_name", "filename", "image_path")
_CAPTION_COLUMNS = ("title", "caption", "text", "sentence")
_TEST_SPLIT = "test"
Pairs = Iterable[tuple[str, str]]
"""(image file, caption), a caption at a time."""


@dataclass(frozen=True)
class CaptionedImages:
    """Numbered images and their captions.

    Attributes:
        name: what people call them.
        images: reads them by number.
        num_images: how many there are; each has a caption.
        captions: of all images.
        image_of: for each caption, the number of its image; these ascend.
        unusable: a line on each thing that is no image with a caption.
    """

    name: str
    images: ImageReader
    num_images: int
    captions: tuple[str, ...]
    image_of: tuple[int, ...]
    unusable: tuple[str, ...] = ()


class ImageFiles:
    """Image files by number; see `ImageReader`."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)

    def read(self, numbers: Iterable[int]) -> Iterator[RawImage]:
        """The images of the given numbers."""
        for number in numbers:
            path = self._paths[number]
            try:
                yield RawImage(str(path), path.read_bytes())
            except OSError as error:
                yield RawImage(str(path), b"", error.strerror or str(error))


def load_captioned_images(
    data: str | Path, *, images: str | Path | None = None, split: str = _TEST_SPLIT
) -> CaptionedImages:
    """Read a caption file, or list shards. Called by all ranks together.

    Args:
        data: a file or shards, see this module.
        images: folder to which the file's image names are relative; by default the file's own.
        split: of a Karpathy file.

    Raises:
        ValueError: nothing there, a file of another form, or no caption in it.
        RanksError: on all ranks, where it happened on one of several.
    """
    shards = find_shards(str(data))
    if shards is not None:
        return _of_shards(shards)
    path = Path(data)
    with ranks.failing_together():
        return _of_file(path, Path(images) if images is not None else path.parent, split)


def _of_file(path: Path, images: Path, split: str) -> CaptionedImages:
    if not path.is_file():
        raise ValueError(f"captions: expected shards, or a .csv, .tsv or .json file; found no file at {path}")
    pairs = _read_json(path, split) if path.suffix.lower() == ".json" else _read_table(path)
    return _group(str(path), pairs, images)


def _group(name: str, pairs: Pairs, folder: Path) -> CaptionedImages:
    captions_of: dict[str, list[str]] = {}
    unusable = []
    for image, caption in pairs:
        if image and caption.strip():
            captions_of.setdefault(image, []).append(caption.strip())
        else:
            unusable.append(f"{image or 'a row without an image'}: its caption is empty or has no image")
    if not captions_of:
        raise ValueError(f"no caption with an image in {name}")
    return CaptionedImages(
        name,
        ImageFiles(folder / image for image in captions_of),
        len(captions_of),
        tuple(caption for captions in captions_of.values() for caption in captions),
        tuple(number for number, captions in enumerate(captions_of.values()) for _ in captions),
        tuple(unusable),
    )


def _of_shards(shards: str) -> CaptionedImages:
    numbered = NumberedShards(shards, "txt")
    lines = [[line.strip() for line in text.splitlines() if line.strip()] for text in numbered.texts]
    return CaptionedImages(
        shards,
        numbered,
        len(lines),
        tuple(line for own in lines for line in own),
        tuple(number for number, own in enumerate(lines) for _ in own),
        numbered.unusable,
    )


def _read_table(path: Path) -> Iterator[tuple[str, str]]:
    text = read_text(path)
    delimiter = "\t" if "\t" in text.partition("\n")[0] else ","
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    columns = reader.fieldnames or []
    image = next((name for name in _IMAGE_COLUMNS if name in columns), None)
    caption = next((name for name in _CAPTION_COLUMNS if name in columns), None)
    if image is None or caption is None:
        raise ValueError(
            f"{path} has the columns {', '.join(columns) or 'none'}; expected for the image one of "
            f"{', '.join(_IMAGE_COLUMNS)}, and for a caption one of {', '.join(_CAPTION_COLUMNS)}"
        )
    for row in reader:
        yield row[image] or "", row[caption] or ""


def _read_json(path: Path, split: str) -> Iterator[tuple[str, str]]:
    try:
        content = json.loads(read_text(path))
        if "annotations" in content:
            yield from _coco(content)
        else:
            yield from _karpathy(content, split, path)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is neither COCO's captions (images, annotations) nor Karpathy's (sentences of images); "
            f"{type(error).__name__}: {error}"
        ) from error


def _coco(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    file_of = {image["id"]: image["file_name"] for image in content["images"]}
    for annotation in content["annotations"]:
        yield file_of[annotation["image_id"]], annotation["caption"]


def _karpathy(content: dict[str, Any], split: str, path: Path) -> Iterator[tuple[str, str]]:
    splits = sorted({image["split"] for image in content["images"]})
    if split not in splits:
        raise ValueError(f"{path} has no split {split!r}; it has {', '.join(splits)}")
    for image in content["images"]:
        if image["split"] == split:
            file = str(Path(image.get("filepath", "")) / image["filename"])
            for sentence in image["sentences"]:
                yield file, sentence["raw"]
