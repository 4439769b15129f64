"""`clip-la classify`: how probable each of a person's labels is for each of their pictures."""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from PIL import Image

from clip_la.bundle import ClipBundle
from clip_la.config import ConfigError
from clip_la.data.decode import Unusable, decode_image
from clip_la.data.losses import printable
from clip_la.data.spec import Limits
from clip_la.errors import ExpectedError
from clip_la.evaluate.classes import read_text
from clip_la.evaluate.features import encode_class_names, progress, refuse_non_finite
from clip_la.evaluate.templates import TEMPLATE_SETS, Templates, load_templates
from clip_la.inference.classification import Classification, Prediction, format_classification
from clip_la.inference.classify_page import page
from clip_la.inference.files import write_text
from clip_la.inference.sources import list_images
from clip_la.model_choice import ModelChoice, add_model_arguments, load_model, probabilities

_EXAMPLES = """examples:
  clip-la classify cat.jpg dog.jpg --checkpoint logs/my-run --labels 'a cat,a dog,something else'
  clip-la classify holiday/ --checkpoint hub/my-model --labels-file labels.txt --html holiday.html
  clip-la classify cat.jpg --model ViT-B-32 --pretrained openai --labels 'a cat,a dog' --templates photo

One of the labels always wins: give one for "none of these". Pictures are turned upright by their EXIF tag."""
_THUMBNAIL_PIXELS = 320
_BATCH_SIZE = 32


@dataclass(frozen=True)
class ClassifyOptions:
    """What `clip-la classify` is told beside the model; see `add_arguments` for the meanings."""

    images: Sequence[str]
    labels: str | None = None
    labels_file: Path | None = None
    templates: str = "openai-80"
    top: int = 5
    json: Path | None = None
    html: Path | None = None
    html_max: int = 500

    def __post_init__(self) -> None:
        if (self.labels is None) == (self.labels_file is None):
            raise ConfigError("give the labels either as --labels a,b,c or as --labels-file FILE")
        if self.top < 1 or self.html_max < 1:
            raise ConfigError("--top and --html-max must be at least 1")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ClassifyOptions:
        """What the command line says."""
        return cls(**{name: getattr(args, name) for name in cls.__dataclass_fields__})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command: `ClassifyOptions`, and the model."""
    parser.description = f"{parser.description}\n\n{_EXAMPLES}"
    add = parser.add_argument
    add("images", nargs="+", metavar="IMAGE", help="image files, or folders of them at any depth")
    add("--labels", metavar="A,B,C", help="what to choose from, separated by commas")
    add("--labels-file", type=Path, metavar="FILE", help="the same, one a line (for labels with a comma)")
    add(
        "--templates",
        default=ClassifyOptions.templates,
        metavar="NAME|FILE",
        help=f"what labels are put into: {', '.join(TEMPLATE_SETS)}, or a file (default: %(default)s)",
    )
    add(
        "--top",
        type=int,
        default=ClassifyOptions.top,
        help="labels to print a picture (default: %(default)s)",
    )
    add("--json", type=Path, metavar="FILE", help="write all probabilities")
    add("--html", type=Path, metavar="FILE", help="write one page with thumbnails that needs no other file")
    add(
        "--html-max",
        type=int,
        default=ClassifyOptions.html_max,
        help="pictures on that page (default: %(default)s)",
    )
    add_model_arguments(parser, positional=False)
    add("--device", default="auto", help="auto, cuda or cpu (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code.

    Raises:
        ExpectedError: a picture that was named, or every picture, can't be read; after all is shown.
    """
    choice, options = ModelChoice.from_args(args), ClassifyOptions.from_args(args)
    labels, pictures = read_labels(options), find_pictures(options.images)
    result = classify(load_model(choice, args.device), options, labels, pictures)
    print(format_classification(result, options.top))
    named = set(map(Path, options.images))
    failed = [path for path, found in zip(pictures, result.predictions, strict=True) if found.error]
    if named.intersection(failed) or len(failed) == len(pictures):
        raise ExpectedError(f"{len(failed)} of {len(pictures)} can't be read")
    return 0


def read_labels(options: ClassifyOptions) -> tuple[str, ...]:
    """The labels, checked.

    Raises:
        ValueError: fewer than two, an empty one, or one given twice.
    """
    if options.labels is not None:
        labels = [label.strip() for label in options.labels.split(",")]
        if not all(labels):
            raise ValueError(f"--labels {options.labels!r} has an empty label; expected a,b,c")
    else:
        path = Path(str(options.labels_file))
        if not path.is_file():
            raise ValueError(f"--labels-file: there is no file at {path}")
        labels = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    twice = [label for label, count in Counter(labels).items() if count > 1]
    if twice:
        raise ValueError(f"given more than once: {', '.join(twice)}; name each label once")
    if len(labels) < 2:
        raise ValueError(
            f"{len(labels)} label(s): with a single one the answer is always 100 %; give at least two, such "
            "as --labels 'cat,something else'"
        )
    return tuple(labels)


def find_pictures(images: Sequence[str]) -> list[Path]:
    """Files as given, and the images of folders; each once.

    Raises:
        ValueError: nothing there, or a folder without an image.
    """
    found: list[Path] = []
    for name in images:
        path = Path(name)
        if path.is_dir():
            inside = list_images(path)
            if not inside:
                raise ValueError(f"no image in the folder {path}")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise ValueError(f"no image and no folder at {path}")
    return list(dict.fromkeys(found))


def classify(
    bundle: ClipBundle, options: ClassifyOptions, labels: tuple[str, ...], pictures: Sequence[Path]
) -> Classification:
    """Classify pictures, and write the files that are asked for.

    Args:
        labels, pictures: from `read_labels` and `find_pictures`.

    Raises:
        ValueError: the model's features are not finite, or the templates can't be used.
        OSError: a file can't be written.
    """
    templates = load_templates(options.templates)
    result = Classification(
        model=bundle.model_name,
        attention=str(bundle.spec),
        templates=templates.name,
        labels=labels,
        exclusive=bundle.model.logit_bias is None,
        predictions=tuple(_predict(bundle, labels, templates, pictures, options)),
    )
    if options.json is not None:
        write_text(options.json, json.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n")
    if options.html is not None:
        write_text(options.html, page(result))
    return result


def _predict(
    bundle: ClipBundle,
    labels: tuple[str, ...],
    templates: Templates,
    pictures: Sequence[Path],
    options: ClassifyOptions,
) -> Iterator[Prediction]:
    label_features = encode_class_names(bundle, labels, templates)
    num_thumbnails = options.html_max if options.html is not None else 0
    waiting = iter(progress(pictures, "pictures"))
    while batch := list(islice(waiting, _BATCH_SIZE)):
        opened = [_open(path) for path in batch]
        readable = [image for image in opened if isinstance(image, Image.Image)]
        answers = iter(_answers(bundle, label_features, readable))
        for path, image in zip(batch, opened, strict=True):
            shown = printable(os.fspath(path), limit=4096)
            if isinstance(image, str):
                yield Prediction(shown, error=image)
            else:
                thumbnail = _thumbnail(image) if num_thumbnails > 0 else ""
                num_thumbnails -= 1
                yield Prediction(shown, next(answers), thumbnail=thumbnail)


def _open(path: Path) -> Image.Image | str:
    """The picture, upright as its EXIF tag says, or why it can't be read."""
    try:
        return decode_image(path.read_bytes(), Limits(), exif_orientation=True)
    except OSError as error:
        return error.strerror or str(error)
    except Unusable as error:
        return f"{error.cause} ({error.detail})"


def _answers(
    bundle: ClipBundle, label_features: torch.Tensor, images: Sequence[Image.Image]
) -> list[tuple[float, ...]]:
    if not images:
        return []
    batch = torch.stack([bundle.preprocess_val(image) for image in images])
    features = refuse_non_finite(bundle.encode_image(batch), "image")
    return [tuple(row) for row in probabilities(bundle, features, label_features).tolist()]


def _thumbnail(image: Image.Image) -> str:
    small = image.copy()
    small.thumbnail((_THUMBNAIL_PIXELS, _THUMBNAIL_PIXELS))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return base64.b64encode(buffer.getvalue()).decode()
