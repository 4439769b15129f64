"""`clip-la`: one thin function a command; what a command does lives in the package that it names."""

from __future__ import annotations

import argparse
import io
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clip_la.exit_codes import EXIT_FAILED, EXIT_PEER_FAILED, EXIT_USAGE
from clip_la.version import __version__

_EXIT_CODES = """exit codes:
  0   done
  1   failed; the last line says why (for `check`: something is wrong with the shards)
  2   the command line or the config can't be used
  3   training stopped: too many non-finite steps in a row; the last good checkpoint is kept
  4   another rank of the job failed or is gone; the last line says which and why; the same command continues
  75  training was stopped by SIGTERM, SIGUSR1 or SIGINT and has saved; the same command continues
  128 + N  ended by signal N at once; a second stop signal ends training so, without a save"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; errors that a person can act on become one line and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may be no text
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.command not in ("train", "submit"):
        parser.error(f"unexpected {' '.join(rest)}")
    args.rest = rest
    _set_up_logging(getattr(args, "log_level", "info"))
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    from clip_la.checkpoint import CheckpointError
    from clip_la.config import ConfigError
    from clip_la.data.loader import NoUsableSamples
    from clip_la.distributed import LaunchError
    from clip_la.evaluate.ranks import RanksError
    from clip_la.openclip import WeightsError
    from clip_la.peers import PeerError

    expected = CheckpointError, LaunchError, NoUsableSamples, RanksError, WeightsError, ValueError, OSError
    try:
        code: int = args.run(args)
    except ConfigError as error:
        return _fail(error, EXIT_USAGE)
    except PeerError as error:
        return _fail(error, EXIT_PEER_FAILED)
    except expected as error:
        return _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except Exception as error:
        logging.getLogger("clip_la").exception("unexpected error")
        return _fail(f"{type(error).__name__}: {error}", EXIT_FAILED)
    return code


def _fail(error: Exception | str, code: int) -> int:
    logging.getLogger("clip_la").debug("in full:", exc_info=isinstance(error, Exception))
    print(f"clip-la: {error}", file=sys.stderr)
    return code


def _set_up_logging(level: str) -> None:
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logging.getLogger("clip_la").setLevel(level.upper())


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="clip-la",
        description="Train, evaluate and compare CLIP models with linear attention in both towers.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"clip-la {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        _add_demo_data,
        _add_check,
        _add_train,
        _add_submit,
        _add_eval,
        _add_watch,
        _add_report,
        _add_fit,
        _add_export,
        _add_embed,
        _add_classify,
        _add_bench,
        _add_runs,
        _add_models,
    ):
        add(commands)
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=help,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


# --- Data -------------------------------------------------------------------------------------------


def _add_demo_data(commands: Any) -> None:
    from clip_la.data.demo import DemoOptions

    parser = _command(
        commands, "demo-data", _demo_data, "Generate a small image-text set with a held-out zero-shot tree."
    )
    parser.add_argument("out", type=Path, help="folder to make; one with the same options is left as it is")
    helps = {
        "num_pairs": "training pairs",
        "num_val_pairs": "validation pairs",
        "images_per_class": "pictures of each held-out colour-shape combination",
        "image_size": "pixels a side",
        "seed": "same seed, same bytes",
    }
    for name, text in helps.items():
        default = getattr(DemoOptions, name)
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=default, help=f"{text} (default: {default})")


def _demo_data(args: argparse.Namespace) -> int:
    from clip_la.data.demo import DemoOptions, build_demo_data

    options = DemoOptions(**{name: getattr(args, name) for name in DemoOptions.__dataclass_fields__})
    made = build_demo_data(args.out, options)
    print(f"{'made' if made else 'already there'}: {args.out} ({options.num_pairs:,} training pairs)")
    return 0


def _add_check(commands: Any) -> None:
    parser = _command(
        commands, "check", _check, "Read shards or a table through: usable pairs, and what is wrong."
    )
    parser.add_argument(
        "train_data", metavar="SHARDS", help="'dir/{00000..00099}.tar' (:: joins lists), or a CSV file"
    )
    parser.add_argument(
        "--sample", type=int, metavar="N", help="read only N shards, spread evenly over the list"
    )
    parser.add_argument("--workers", type=int, default=2, help="reading processes (default: %(default)s)")
    parser.add_argument("--empty-caption", default="drop", choices=("drop", "keep"), help="as in training")
    parser.add_argument("--csv-separator", default="\t", help="column separator of CSV files")
    parser.add_argument("--csv-img-key", default="filepath", help="CSV column of image paths")
    parser.add_argument("--csv-caption-key", default="title", help="CSV column of captions")
    parser.add_argument(
        "--allow-pipe", action="store_true", help="allow shard lists to run commands with pipe:"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything, shard by shard")


def _check(args: argparse.Namespace) -> int:
    import open_clip

    from clip_la.data.check import check_data
    from clip_la.data.check_text import format_check
    from clip_la.data.spec import DataSpec
    from clip_la.data.urls import sample_shards

    names = ("train_data", "empty_caption", "csv_separator", "csv_img_key", "csv_caption_key", "allow_pipe")
    spec = DataSpec(batch_size=1, **{name: getattr(args, name) for name in names})
    if args.sample is not None:
        spec = replace(spec, train_data=sample_shards(spec.train_data, args.sample))
    report = check_data(spec, open_clip.get_tokenizer("ViT-B-16"), workers=args.workers)
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    print(format_check(report))
    return 0 if report.is_clean else EXIT_FAILED


# --- Training ---------------------------------------------------------------------------------------


def _add_train(commands: Any) -> None:
    from clip_la.config_sources import add_flags

    parser = _command(
        commands,
        "train",
        _train,
        "Train a model. Flags are OpenCLIP's and win over the config; run again to continue.",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file; `base: OTHER.yaml` in it inherits"
    )
    add_flags(parser)


def _train(args: argparse.Namespace) -> int:
    from clip_la.config_sources import flags_given, load_run_config, refuse_unknown_flags
    from clip_la.train.loop import train

    refuse_unknown_flags(args.rest)
    config = load_run_config(args.config, flags_given(args))
    _set_up_logging(config.log_level)
    return train(config)


def _add_submit(commands: Any) -> None:
    parser = _command(
        commands,
        "submit",
        _submit,
        "Show what a run will take, check it, and submit it to Slurm; `clip-la train` flags follow.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file of the run")
    parser.add_argument("--nodes", type=int, required=True, help="nodes of the job")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="one task each (default: %(default)s)")
    parser.add_argument("--time", default=None, help="time limit (default: the sbatch file's)")
    parser.add_argument(
        "--sbatch", default="", metavar="OPTIONS", help="other sbatch options, as '--account=x --partition=y'"
    )
    parser.add_argument(
        "--script",
        type=Path,
        default=Path("slurm/train.sbatch"),
        help="what is submitted (default: %(default)s)",
    )
    parser.add_argument(
        "--utilisation",
        type=float,
        default=0.15,
        help="share of the GPUs' peak in the estimate of hours; OpenCLIP's published LAION-400M runs come to "
        "0.13 to 0.16 (default: %(default)s)",
    )
    parser.add_argument("--dry-run", action="store_true", help="show everything and submit nothing")


def _submit(args: argparse.Namespace) -> int:
    from clip_la.cluster.submit import Job, submit

    job = Job(**{name: getattr(args, name) for name in Job.__dataclass_fields__})
    return submit(job, args.rest, dry_run=args.dry_run)


def _add_bench(commands: Any) -> None:
    from clip_la.bench.command import add_bench_flags

    parser = _command(
        commands,
        "bench",
        _bench,
        "Time softmax, Eq. 4 and Eq. 7 over lengths and whole models' training steps; memory and errors too.",
    )
    add_bench_flags(parser)


def _bench(args: argparse.Namespace) -> int:
    from clip_la.bench.command import run_bench

    for path in run_bench(args):
        print(f"wrote {path}")
    return 0


def _add_runs(commands: Any) -> None:
    parser = _command(
        commands, "runs", _runs, "List the runs of a logs folder: state, progress, last figures."
    )
    parser.add_argument("logs", type=Path, nargs="?", default=Path("logs"), help="default: logs")


def _runs(args: argparse.Namespace) -> int:
    from clip_la.report.listing import list_runs, listing_text

    print(listing_text(list_runs(args.logs)))
    return 0


def _add_models(commands: Any) -> None:
    _command(commands, "models", _models, "List the models that this package adds to OpenCLIP's.")


def _models(args: argparse.Namespace) -> int:
    from clip_la.attention.spec import AttentionSpec
    from clip_la.bundle import resolve_model_config
    from clip_la.openclip import list_linear_models

    for name in list_linear_models():
        config = resolve_model_config(name)
        print(f"{name:<20} attention {AttentionSpec.from_config(config.get('attention'))}")
    return 0


# --- Evaluation and reports -------------------------------------------------------------------------


def _add_eval(commands: Any) -> None:
    from clip_la.evaluate import benchmark
    from clip_la.evaluate.command import add_arguments
    from clip_la.inference.model import add_model_arguments

    parser = _command(
        commands,
        "eval",
        _eval,
        "Zero-shot accuracy, or image-text retrieval, of any CLIP that OpenCLIP builds.",
    )
    add_model_arguments(parser, positional=False)
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu (default: %(default)s)")
    benchmark.add_arguments(parser, add_arguments(parser))


def _eval(args: argparse.Namespace) -> int:
    from clip_la.distributed import init_world
    from clip_la.evaluate.command import EvalOptions, format_evaluation, run_evaluation
    from clip_la.inference.model import ModelChoice, load_model
    from clip_la.peers import shared_fate

    if args.benchmark is not None:
        return _benchmark(args)
    choice, options = ModelChoice.from_args(args), EvalOptions.from_args(args)
    world = init_world(args.device)
    with shared_fate(world):
        report = run_evaluation(load_model(choice, world.device), options, str(choice))
        if world.is_main:
            print(format_evaluation(report))
    return 0


def _benchmark(args: argparse.Namespace) -> int:
    from clip_la.evaluate.benchmark import BenchmarkOptions, format_benchmark, run_benchmark
    from clip_la.inference.model import ModelChoice, load_model

    choice, options = ModelChoice.from_args(args), BenchmarkOptions.from_args(args)
    results = run_benchmark(load_model(choice, args.device), options, str(choice))
    print(format_benchmark(results, options.benchmark_out))
    return 0


def _add_watch(commands: Any) -> None:
    from clip_la.evaluate.command import add_arguments

    parser = _command(
        commands,
        "watch",
        _watch,
        "Evaluate each checkpoint that a training run keeps, until the run has ended.",
    )
    parser.add_argument(
        "run_folder", type=Path, metavar="RUN", help="the run's folder; results go to its evals.jsonl"
    )
    parser.add_argument(
        "--poll-seconds", type=float, default=60, help="between looks for files (default: %(default)s)"
    )
    parser.add_argument(
        "--patience-hours",
        type=float,
        default=24,
        help="end after so long without a line from the trainer (default: %(default)s)",
    )
    parser.add_argument("--precision", default=None, help="default: the one it was trained in")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu (default: %(default)s)")
    add_arguments(parser)


def _watch(args: argparse.Namespace) -> int:
    from clip_la.checkpoint import load_bundle
    from clip_la.cluster.watch import watch
    from clip_la.distributed import init_world
    from clip_la.evaluate.command import EvalOptions, format_evaluation, run_evaluation
    from clip_la.peers import shared_fate

    options = EvalOptions.from_args(args)
    world = init_world(args.device)

    def evaluate(path: Path) -> dict[str, Any]:
        bundle = load_bundle(path, precision=args.precision, device=world.device)
        report = run_evaluation(bundle, options, str(path))
        if world.is_main:
            print(format_evaluation(report), flush=True)
        metrics: dict[str, Any] = report["metrics"]
        return metrics

    with shared_fate(world):
        num_evaluated = watch(
            args.run_folder,
            options.name,
            evaluate,
            world,
            poll_seconds=args.poll_seconds,
            patience_hours=args.patience_hours,
        )
        if world.is_main:
            print(f"{num_evaluated} checkpoint(s) evaluated")
    return 0


def _add_report(commands: Any) -> None:
    parser = _command(
        commands, "report", _report, "Compare runs: table, curves, one self-contained HTML page."
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    parser.add_argument(
        "--out", type=Path, default=Path("report"), help="folder to write (default: %(default)s)"
    )
    parser.add_argument("--log-axis", action="store_true", help="losses on a logarithmic axis")


def _report(args: argparse.Namespace) -> int:
    from clip_la.report.write import write_report

    summary = write_report(args.runs, args.out, log_axis=args.log_axis)
    print(summary.text)
    print("\nwritten: " + ", ".join(map(str, summary.paths)))
    return 0


def _add_fit(commands: Any) -> None:
    parser = _command(
        commands, "fit", _fit, "Fit L(N) = a N^-b over runs of different sizes, for each attention."
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    parser.add_argument(
        "--out", type=Path, default=Path("fit"), help="folder to write (default: %(default)s)"
    )
    parser.add_argument(
        "--loss",
        default="train",
        metavar="NAME",
        help="which loss: train, or an evaluation's name, such as validation (default: %(default)s)",
    )


def _fit(args: argparse.Namespace) -> int:
    from clip_la.report.scaling import write_fit

    summary = write_fit(args.runs, args.out, loss=args.loss)
    print(summary.text)
    print("\nwritten: " + ", ".join(map(str, summary.paths)))
    return 0


# --- A trained model in use --------------------------------------------------------------------------


def _add_export(commands: Any) -> None:
    from clip_la.export.command import add_arguments

    add_arguments(
        _command(
            commands,
            "export",
            _export,
            "A trained model for other tools: OpenCLIP hub folder, safetensors, ONNX, the Hugging Face Hub.",
        )
    )


def _export(args: argparse.Namespace) -> int:
    from clip_la.export.command import ExportOptions, run_export
    from clip_la.inference.model import ModelChoice

    print("\n".join(run_export(ModelChoice.from_args(args), ExportOptions.from_args(args))))
    return 0


def _add_embed(commands: Any) -> None:
    from clip_la.inference.embed import add_arguments
    from clip_la.inference.model import add_model_arguments

    parser = _command(
        commands,
        "embed",
        _embed,
        "Embeddings of images and texts: .npy with parquet metadata, in the layout of clip-retrieval.",
    )
    add_model_arguments(parser, positional=True)
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu (default: %(default)s)")
    add_arguments(parser)


def _embed(args: argparse.Namespace) -> int:
    from clip_la.inference.embed import EmbedOptions, embed
    from clip_la.inference.model import ModelChoice, load_model

    options = EmbedOptions.from_args(args)
    print(embed(load_model(ModelChoice.from_args(args), args.device), options))
    return 0


def _add_classify(commands: Any) -> None:
    from clip_la.inference.classify import add_arguments
    from clip_la.inference.model import add_model_arguments

    parser = _command(
        commands, "classify", _classify, "How probable each of your labels is for your pictures."
    )
    add_arguments(parser)
    add_model_arguments(parser, positional=False)
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu (default: %(default)s)")


def _classify(args: argparse.Namespace) -> int:
    from clip_la.inference.classification import format_classification
    from clip_la.inference.classify import ClassifyOptions, classify, find_pictures, read_labels
    from clip_la.inference.model import ModelChoice, load_model

    choice, options = ModelChoice.from_args(args), ClassifyOptions.from_args(args)
    labels, pictures = read_labels(options), find_pictures(options.images)
    result = classify(load_model(choice, args.device), options, labels, pictures)
    print(format_classification(result, options.top))
    named = set(map(Path, options.images))
    failed = [path for path, found in zip(pictures, result.predictions, strict=True) if found.error]
    if named.intersection(failed) or len(failed) == len(pictures):
        return _fail(f"{len(failed)} of {len(pictures)} can't be read", EXIT_FAILED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
