"""`clip-la eval --benchmark`: LAION's CLIP_benchmark on a model of this package, in this process.

CLIP_benchmark does everything but building the model: it is given this one under a model type of its own. One
thing in it is replaced, and only where it fails: `accuracy`, which numpy 2.4 and newer can't run.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from clip_la.bundle import ClipBundle
from clip_la.config import ConfigError
from clip_la.evaluate.features import evaluation_mode
from clip_la.evaluate.tally import true_class_positions

logger = logging.getLogger(__name__)
MODEL_TYPE = "clip_la"


@dataclass(frozen=True)
class BenchmarkOptions:
    """What `clip-la eval --benchmark` is told beside the model; see `add_arguments` for the meanings."""

    benchmark: Sequence[str]
    benchmark_root: str = "root"
    benchmark_out: Path = Path("benchmark")
    benchmark_args: str = ""
    batch_size: int = 64
    workers: int = 2

    def __post_init__(self) -> None:
        reserved = {
            "--model",
            "--pretrained",
            "--pretrained_model",
            "--model_type",
            "--output",
            "--distributed",
        }
        given = {word.partition("=")[0] for word in shlex.split(self.benchmark_args)} & reserved
        if given:
            raise ConfigError(
                f"--benchmark-args can't have {', '.join(sorted(given))}: clip-la eval sets them"
            )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> BenchmarkOptions:
        """What the command line says."""
        return cls(**{name: getattr(args, name) for name in cls.__dataclass_fields__})


def add_arguments(parser: argparse.ArgumentParser, what: argparse._MutuallyExclusiveGroup) -> None:
    """The flags of `BenchmarkOptions` that `clip-la eval` doesn't have anyway.

    Args:
        what: the group of flags of which exactly one is to be given.
    """
    what.add_argument(
        "--benchmark",
        nargs="+",
        metavar="DATASET",
        help="run CLIP_benchmark (extra `benchmark`) on its data sets, or on wds/NAME, a webdataset folder: "
        "classnames.txt, zeroshot_classification_templates.txt, test/nshards.txt, test/0.tar, ...",
    )
    add = parser.add_argument_group("with --benchmark").add_argument
    add(
        "--benchmark-root",
        default=BenchmarkOptions.benchmark_root,
        metavar="DIR",
        help="where they lie; {dataset} stands for the name (default: %(default)s)",
    )
    add(
        "--benchmark-out",
        type=Path,
        default=BenchmarkOptions.benchmark_out,
        metavar="DIR",
        help="for its JSON files, one a data set (default: %(default)s)",
    )
    add(
        "--benchmark-args",
        default="",
        metavar="FLAGS",
        help="more of its flags, as --benchmark-args='--task zeroshot_retrieval --recall_k 1 5'",
    )


def run_benchmark(bundle: ClipBundle, options: BenchmarkOptions, source: str) -> list[dict[str, Any]]:
    """Run CLIP_benchmark on the data sets.

    Args:
        source: of the weights; goes into the results as `pretrained`.

    Returns:
        CLIP_benchmark's own result of each data set, as written to `benchmark_out`.

    Raises:
        ValueError: it isn't installed, or failed on a data set; what it says is in the message.
    """
    if find_spec("clip_benchmark") is None:
        raise ValueError("--benchmark needs CLIP_benchmark: pip install 'clip_la[benchmark]'")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("--benchmark runs in one process; start it without torchrun")
    from clip_benchmark import cli

    options.benchmark_out.mkdir(parents=True, exist_ok=True)
    logger.info("CLIP_benchmark %s", version("clip-benchmark"))
    with (
        tempfile.TemporaryDirectory(prefix=".partial", dir=options.benchmark_out) as partial,
        _model_type(bundle),
        _working_accuracy(),
        evaluation_mode(bundle.model),
        patch.object(sys, "argv", _command_line(bundle, options, source, Path(partial))),
    ):
        try:
            cli.main()
        except Exception as error:  # whatever its readers and metrics lead to
            raise ValueError(f"CLIP_benchmark failed: {type(error).__name__}: {error}") from error
        found = sorted(Path(partial).iterdir())
        results = [json.loads(path.read_text(encoding="utf-8")) for path in found]
        for path in found:
            os.replace(path, options.benchmark_out / path.name)
    return results


def _command_line(bundle: ClipBundle, options: BenchmarkOptions, source: str, out: Path) -> list[str]:
    folder = str(out).replace("{", "{{").replace("}", "}}")  # it formats the path
    return [
        "clip_benchmark",
        "eval",
        *("--dataset", *options.benchmark, "--dataset_root", options.benchmark_root),
        *("--model_type", MODEL_TYPE, "--model", bundle.model_name, "--pretrained", source),
        *("--batch_size", str(options.batch_size), "--num_workers", str(_num_workers(options))),
        *("--output", f"{folder}/{{dataset}}_{{task}}_{{language}}.json", "--quiet"),
        *(["--no_amp"] if bundle.precision == "fp32" else []),
        *shlex.split(options.benchmark_args),
    ]


def _num_workers(options: BenchmarkOptions) -> int:
    """No more than a webdataset folder has shards: webdataset fails in a reader that has none."""
    shards = [options.workers]
    for dataset in options.benchmark:
        name = dataset.removeprefix("wds/")
        root = Path(options.benchmark_root.format(dataset=name, dataset_cleaned=name.replace("/", "-")))
        shards += [int(path.read_text()) for path in root.glob("*/nshards.txt")] if name != dataset else []
    return min(shards)


@contextmanager
def _model_type(bundle: ClipBundle) -> Iterator[None]:
    """CLIP_benchmark's model types, and one more that is this model."""
    from clip_benchmark import models

    def load(device: str | torch.device, **_: Any) -> tuple[Any, Any, Any]:
        """What CLIP_benchmark expects of a model type: model, transform, tokenizer."""
        return bundle.model.to(device), bundle.preprocess_val, bundle.tokenizer

    models.MODEL_TYPES.append(MODEL_TYPE)
    try:
        with patch.dict(models.TYPE2FUNC, {MODEL_TYPE: load}):
            yield
    finally:
        models.MODEL_TYPES.remove(MODEL_TYPE)


@contextmanager
def _working_accuracy() -> Iterator[None]:
    """CLIP_benchmark's `accuracy` as it is, or, where this numpy can't run it, one that does the same."""
    from clip_benchmark.metrics import zeroshot_classification

    try:
        zeroshot_classification.accuracy(torch.eye(2), torch.arange(2), topk=(1,))
    except TypeError as error:
        logger.warning("CLIP_benchmark's accuracy() can't run here (%s); it is replaced for this run", error)
        with patch.object(zeroshot_classification, "accuracy", accuracy):
            yield
    else:
        yield


def accuracy(output: Tensor, target: Tensor, topk: Sequence[int] = (1,)) -> list[float]:
    """Top-k accuracies, a fraction for each k.

    Args:
        output: scores (n, classes).
        target: int64 (n,).
    """
    positions = true_class_positions(output, target)
    return [(positions < k).double().mean().item() for k in topk]


def format_benchmark(results: Sequence[dict[str, Any]], out: Path) -> str:
    """The results as a table for people."""
    lines = []
    for result in results:
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in result["metrics"].items())
        lines.append(f"{result['dataset']:<24}{result['task']}: {metrics}")
    return "\n".join([*lines, f"CLIP_benchmark's files: {out}"])
