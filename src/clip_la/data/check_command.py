"""`clip-la check`: read shards or a table through, say what is usable and what is wrong."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import open_clip

from clip_la.data.check import check_data
from clip_la.data.check_text import format_check
from clip_la.data.spec import DataSpec
from clip_la.data.urls import sample_shards
from clip_la.exit_codes import EXIT_FAILED, EXIT_FINISHED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add = parser.add_argument
    add("train_data", metavar="SHARDS", help="'dir/{00000..00099}.tar' (:: joins lists), or a CSV file")
    add("--sample", type=int, metavar="N", help="read only N shards, spread evenly over the list")
    add("--workers", type=int, default=2, help="reading processes (default: %(default)s)")
    add("--empty-caption", default="drop", choices=("drop", "keep"), help="as in training")
    add("--csv-separator", default="\t", help="column separator of CSV files")
    add("--csv-img-key", default="filepath", help="CSV column of image paths")
    add("--csv-caption-key", default="title", help="CSV column of captions")
    add("--allow-pipe", action="store_true", help="allow shard lists to run commands with pipe:")
    add("--json", type=Path, metavar="FILE", help="write everything, shard by shard")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code, `EXIT_FAILED` where something is wrong with the data."""
    names = ("train_data", "empty_caption", "csv_separator", "csv_img_key", "csv_caption_key", "allow_pipe")
    spec = DataSpec(batch_size=1, **{name: getattr(args, name) for name in names})
    if args.sample is not None:
        spec = replace(spec, train_data=sample_shards(spec.train_data, args.sample))
    report = check_data(spec, open_clip.get_tokenizer("ViT-B-16"), workers=args.workers)
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    print(format_check(report))
    return EXIT_FINISHED if report.is_clean else EXIT_FAILED
