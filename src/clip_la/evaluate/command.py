"""`clip-la eval`, without the loading of the model: options, the evaluation, the table for people."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clip_la.attention.spec import AttentionSpec
from clip_la.bundle import ClipBundle
from clip_la.evaluate import ranks
from clip_la.evaluate.results import format_class_rows, write_whole
from clip_la.evaluate.templates import TEMPLATE_SETS
from clip_la.evaluate.wordnet import RELEASES
from clip_la.evaluate.zeroshot import ZeroShot

_NUM_CONFUSIONS = 20
_NUM_CONFUSIONS_PRINTED = 5


@dataclass(frozen=True)
class ZeroShotOptions:
    """What `clip-la eval --zeroshot` is told beside the model; see `add_arguments` for the meanings."""

    zeroshot: Path
    classnames: str
    templates: str = "openai-80"
    batch_size: int = 64
    workers: int = 2
    allow_missing_classes: bool = False
    allow_unknown_folders: bool = False
    per_class_csv: Path | None = None
    json: Path | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ZeroShotOptions:
        return cls(**{name: getattr(args, name) for name in cls.__dataclass_fields__})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `ZeroShotOptions`."""
    add = parser.add_argument
    add("--zeroshot", type=Path, required=True, metavar="DIR", help="tree with one folder of images a class")
    add(
        "--classnames",
        required=True,
        metavar="FILE",
        help="class names: .txt with `name` or `folder<TAB>name` lines, .json, .csv, or one of "
        f"{', '.join(RELEASES)} by WordNet id",
    )
    add(
        "--templates",
        default=ZeroShotOptions.templates,
        metavar="NAME|FILE",
        help=f"prompt templates: {', '.join(TEMPLATE_SETS)}, or a file (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=int,
        default=ZeroShotOptions.batch_size,
        help="images a batch (default: %(default)s)",
    )
    add(
        "--workers",
        type=int,
        default=ZeroShotOptions.workers,
        help="decoding processes (default: %(default)s)",
    )
    add("--allow-missing-classes", action="store_true", help="accept classes that have no folder")
    add("--allow-unknown-folders", action="store_true", help="leave out folders that are no class")
    add("--per-class-csv", type=Path, metavar="FILE", help="write a row a class")
    add("--json", type=Path, metavar="FILE", help="write the whole result")


def run_zero_shot(
    bundle: ClipBundle, options: ZeroShotOptions, checkpoint: str | None = None
) -> dict[str, Any]:
    """Evaluate and write the files that are asked for.

    Returns:
        JSON-safe: `model`, `attention`, `precision`, `checkpoint`, `zeroshot` (the tree), `metrics` (see
        `ZeroShotResult.metrics`), and `most_confused`, the wrong answers given most often.

    Raises:
        ValueError: see `ZeroShot`.
    """
    evaluator = ZeroShot(
        options.zeroshot,
        options.classnames,
        options.templates,
        batch_size=options.batch_size,
        workers=options.workers,
        allow_missing_classes=options.allow_missing_classes,
        allow_unknown_folders=options.allow_unknown_folders,
    )
    with ranks.failing_together():
        _prepare_files(options)
    result = evaluator.evaluate(bundle)
    report = {
        "model": bundle.model_name,
        "attention": bundle.spec.to_config(),
        "precision": bundle.precision,
        "checkpoint": checkpoint,
        "zeroshot": str(options.zeroshot),
        "metrics": result.metrics(),
        "most_confused": [asdict(confusion) for confusion in result.confusions()[:_NUM_CONFUSIONS]],
    }
    if ranks.rank_and_world_size()[0] == 0:
        if options.per_class_csv is not None:
            write_whole(options.per_class_csv, format_class_rows(result.class_rows()))
        if options.json is not None:
            write_whole(options.json, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return report


def _prepare_files(options: ZeroShotOptions) -> None:
    """Make the folders of the files to write, so that what can't be written fails before the work."""
    for path in (options.per_class_csv, options.json):
        if path is None:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise ValueError(f"can't write {path}: it is a folder, or its folder can't be written to")


def format_zero_shot(report: dict[str, Any]) -> str:
    """The report of `run_zero_shot` as a table for people."""
    metrics = report["metrics"]
    rows = [
        (
            "model",
            f"{report['model']}, {AttentionSpec.from_config(report['attention'])}, {report['precision']}",
        ),
        ("checkpoint", report["checkpoint"]),
        ("images", f"{report['zeroshot']}: {metrics['num_images']} in {metrics['num_classes']} classes"),
        ("class list", metrics["class_list_hash"]),
        ("templates", f"{metrics['templates']} ({metrics['templates_hash']})"),
        (
            "top-1",
            f"{metrics['top1']:.2%}  (95 % interval {metrics['top1_low']:.2%} to {metrics['top1_high']:.2%}, "
            f"chance {metrics['chance']:.2%})",
        ),
        ("top-5", f"{metrics['top5']:.2%}"),
        ("mean per class", f"{metrics['mean_per_class']:.2%}"),
        *(("note", note) for note in _notes(metrics)),
        *(
            ("confused", f"{pair['true']} -> {pair['predicted']}: {pair['num_images']} ({pair['share']:.0%})")
            for pair in report["most_confused"][:_NUM_CONFUSIONS_PRINTED]
            if pair["num_images"] > 1
        ),
    ]
    return "\n".join(f"{label:<16}{value}" for label, value in rows if value is not None)


def _notes(metrics: dict[str, Any]) -> list[str]:
    sentences = {
        "num_unreadable": "image(s) could not be read and count nowhere",
        "num_other_files": "file(s) in class folders are no images by their suffix",
        "num_missing_classes": "class(es) have no folder; they stay possible answers",
        "num_classes_without_images": "class(es) have no readable image; not in the mean per class",
        "num_unknown_folders": "folder(s) are no class and were left out",
        "num_duplicate_names": "class(es) share their name with another; ties go to the first of them",
    }
    return [f"{metrics[key]} {sentence}" for key, sentence in sentences.items() if metrics[key]]
