"""`clip-la eval`: options, the evaluation, the table for people."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clip_la.attention.spec import AttentionSpec
from clip_la.bundle import ClipBundle
from clip_la.distributed import init_world
from clip_la.evaluate import benchmark, ranks
from clip_la.evaluate.cache import EvaluationCache, default_folder
from clip_la.evaluate.caption_retrieval import CaptionRetrieval
from clip_la.evaluate.classes import CLASS_LISTS
from clip_la.evaluate.results import format_class_rows, write_whole
from clip_la.evaluate.shards import name_of
from clip_la.evaluate.templates import TEMPLATE_SETS
from clip_la.evaluate.zeroshot import CLASSES_FILE, ZeroShot
from clip_la.model_choice import ModelChoice, add_model_arguments, load_model
from clip_la.peers import shared_fate

_NUM_CONFUSIONS = 20
_NUM_CONFUSIONS_PRINTED = 5


@dataclass(frozen=True)
class EvalOptions:
    """What `clip-la eval` is told beside the model; see `add_data_arguments` for the meanings."""

    zeroshot: str | None = None
    classnames: str | None = None
    templates: str | None = None
    numeric_labels: bool = False
    allow_missing_classes: bool = False
    allow_unknown_folders: bool = False
    per_class_csv: Path | None = None
    retrieval: str | None = None
    images: Path | None = None
    split: str = "test"
    batch_size: int = 64
    workers: int = 2
    json: Path | None = None
    cache: Path | None = None
    no_cache: bool = False

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> EvalOptions:
        """What the command line says."""
        return cls(**{name: getattr(args, name) for name in cls.__dataclass_fields__})

    @property
    def name(self) -> str:
        """Of the evaluation, as in a run's metrics."""
        kind, data = (
            ("zeroshot", self.zeroshot) if self.zeroshot is not None else ("retrieval", self.retrieval)
        )
        return f"{kind}/{name_of(str(data))}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command: the model, what to evaluate, and CLIP_benchmark's."""
    add_model_arguments(parser, positional=False)
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu (default: %(default)s)")
    benchmark.add_arguments(parser, add_data_arguments(parser))


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    if args.benchmark is not None:
        return _run_benchmark(args)
    choice, options = ModelChoice.from_args(args), EvalOptions.from_args(args)
    world = init_world(args.device)
    with shared_fate(world):
        report = run_evaluation(load_model(choice, world.device), options, str(choice))
        if world.is_main:
            print(format_evaluation(report))
    return 0


def _run_benchmark(args: argparse.Namespace) -> int:
    choice, options = ModelChoice.from_args(args), benchmark.BenchmarkOptions.from_args(args)
    results = benchmark.run_benchmark(load_model(choice, args.device), options, str(choice))
    print(benchmark.format_benchmark(results, options.benchmark_out))
    return 0


def add_data_arguments(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """The flags of `EvalOptions`; returns the group of flags of which exactly one is to be given."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--zeroshot",
        metavar="DATA",
        help="classify images: a tree with one folder of images a class, or webdataset shards with .cls "
        "labels ('dir/{0..7}.tar', or a folder of them)",
    )
    what.add_argument(
        "--retrieval",
        metavar="DATA",
        help="find images by caption and captions by image: a .csv or .tsv file of images and captions, "
        "COCO's or Karpathy's .json, or shards whose .txt has a caption a line",
    )
    _add_zero_shot_arguments(parser.add_argument_group("with --zeroshot"))
    _add_retrieval_arguments(parser.add_argument_group("with --retrieval"))
    add, defaults = parser.add_argument, EvalOptions
    add("--batch-size", type=int, default=defaults.batch_size, help="images a batch (default: %(default)s)")
    add("--workers", type=int, default=defaults.workers, help="decoding processes (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the whole result")
    add(
        "--cache",
        type=Path,
        metavar="DIR",
        help="where text features are kept, and how far an evaluation has come, so that one that was killed "
        f"continues (default: $CLIP_LA_CACHE, or {default_folder()})",
    )
    add("--no-cache", action="store_true", help="keep nothing")
    return what


def _add_zero_shot_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--classnames",
        metavar="FILE|LIST",
        help="class names: .txt with `name` or `folder<TAB>name` lines, .json, .csv, or one of "
        f"{', '.join(CLASS_LISTS)} (default: {CLASSES_FILE} in the tree, or beside the shards or above them)",
    )
    add(
        "--templates",
        metavar="NAME|FILE",
        help=f"prompt templates: {', '.join(TEMPLATE_SETS)}, or a file (default: those beside the shards, "
        "or openai-80)",
    )
    add(
        "--numeric-labels",
        action="store_true",
        help="folders called by numbers count the class list from 0 (numeric labels of shards always do)",
    )
    add("--allow-missing-classes", action="store_true", help="accept classes that have no folder or label")
    add("--allow-unknown-folders", action="store_true", help="leave out folders or labels that are no class")
    add("--per-class-csv", type=Path, metavar="FILE", help="write a row a class")


def _add_retrieval_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--images", type=Path, metavar="DIR", help="folder of the file's images (default: the file's own)")
    add("--split", default=EvalOptions.split, help="of a Karpathy file (default: %(default)s)")


def run_evaluation(bundle: ClipBundle, options: EvalOptions, checkpoint: str | None = None) -> dict[str, Any]:
    """Evaluate and write the files that are asked for. Called by all ranks together.

    Returns:
        JSON-safe: `name`, `model`, `attention`, `precision`, `checkpoint`, `data`, `metrics` (see
        `ZeroShotResult.metrics` and `CaptionRetrieval.run`), and for a zero-shot evaluation `most_confused`,
        the wrong answers given most often.

    Raises:
        ValueError: the data or the classes can't be used; see `ZeroShot` and `CaptionRetrieval`.
        RanksError: on all ranks, where something happened on some of several.
    """
    with ranks.failing_together():
        _prepare_files(options)
    report = {
        "name": options.name,
        "model": bundle.model_name,
        "attention": bundle.spec.to_config(),
        "precision": bundle.precision,
        "checkpoint": checkpoint,
        "data": options.zeroshot or options.retrieval,
        **(_zero_shot(bundle, options) if options.zeroshot is not None else _retrieval(bundle, options)),
    }
    if options.json is not None and ranks.rank_and_world_size()[0] == 0:
        write_whole(options.json, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return report


def _zero_shot(bundle: ClipBundle, options: EvalOptions) -> dict[str, Any]:
    evaluator = ZeroShot(
        str(options.zeroshot),
        options.classnames,
        options.templates,
        batch_size=options.batch_size,
        workers=options.workers,
        numeric_labels=options.numeric_labels,
        allow_missing_classes=options.allow_missing_classes,
        allow_unknown_folders=options.allow_unknown_folders,
        cache=None if options.no_cache else EvaluationCache(options.cache or default_folder()),
    )
    result = evaluator.evaluate(bundle)
    if options.per_class_csv is not None and ranks.rank_and_world_size()[0] == 0:
        write_whole(options.per_class_csv, format_class_rows(result.class_rows()))
    confusions = [asdict(confusion) for confusion in result.confusions()[:_NUM_CONFUSIONS]]
    return {"metrics": result.metrics(), "most_confused": confusions}


def _retrieval(bundle: ClipBundle, options: EvalOptions) -> dict[str, Any]:
    evaluator = CaptionRetrieval(
        str(options.retrieval),
        images=options.images,
        split=options.split,
        batch_size=options.batch_size,
        workers=options.workers,
    )
    return {"metrics": evaluator.run(bundle)}


def _prepare_files(options: EvalOptions) -> None:
    """Make the folders of the files to write, so that what can't be written fails before the work."""
    for path in (options.per_class_csv, options.json):
        if path is None:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise ValueError(f"can't write {path}: it is a folder, or its folder can't be written to")


def format_evaluation(report: dict[str, Any]) -> str:
    """The report of `run_evaluation` as a table for people."""
    attention = AttentionSpec.from_config(report["attention"])
    rows = [
        ("model", f"{report['model']}, {attention}, {report['precision']}"),
        ("checkpoint", report["checkpoint"]),
        *(_zero_shot_rows(report) if "most_confused" in report else _retrieval_rows(report)),
    ]
    return "\n".join(f"{label:<16}{value}" for label, value in rows if value is not None)


def _zero_shot_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    metrics = report["metrics"]
    return [
        ("images", f"{report['data']}: {metrics['num_images']} in {metrics['num_classes']} classes"),
        ("class list", f"{metrics['class_list']} ({metrics['class_list_hash']})"),
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


def _retrieval_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    metrics = report["metrics"]
    rows = [("data", f"{report['data']}: {metrics['num_images']} images, {metrics['num_texts']} captions")]
    for direction, label in (("image_to_text", "image to text"), ("text_to_image", "text to image")):
        recalls = ", ".join(f"@{k} {metrics[f'{direction}_recall@{k}']:.2%}" for k in (1, 5, 10))
        mean, median = metrics[f"{direction}_mean_rank"], metrics[f"{direction}_median_rank"]
        rows.append((label, f"recall {recalls}; rank: mean {mean:.1f}, median {median:g}"))
    return [*rows, *(("note", note) for note in _notes(metrics))]


def _notes(metrics: dict[str, Any]) -> list[str]:
    sentences = {
        "num_unreadable": "image(s) could not be read and count nowhere",
        "num_captions_left_out": "caption(s) of images that could not be read were left out",
        "num_other_files": "file(s) in class folders are no images by their suffix",
        "num_missing_classes": "class(es) have no folder or label; they stay possible answers",
        "num_classes_without_images": "class(es) have no readable image; not in the mean per class",
        "num_unknown_folders": "folder(s) or label(s) are no class and were left out",
        "num_duplicate_names": "class(es) share their name with another; ties go to the first of them",
    }
    return [f"{metrics[key]} {sentence}" for key, sentence in sentences.items() if metrics.get(key)]
