"""Which linear attention learns as well as softmax: a grid of small trainings and a table of how they ended.

    python benchmarks/attention_variants.py train --out variants             # every variant, 3 rates
    python benchmarks/attention_variants.py train --out variants --variants softmax gain centred \\
        --lrs 1e-3 --seeds 0 1 2 --samples 48000 --image-size 64
    python benchmarks/attention_variants.py table --out variants
    python benchmarks/attention_variants.py transfer --out variants          # at 2 and 4 times the resolution

The data are those of `clip-la demo-data`, made in OUT/demo; with --data FOLDER, another set of that layout,
as `benchmarks/icon_data.py` makes one; with --emoji FOLDER, the shards FOLDER/emoji/0000{0..6}.tar, with
FOLDER/emoji/00007.tar held out for the validation loss, and the tree FOLDER/zeroshot/emoji_fluent.
Run again, it trains what is not there yet. docs/attention_variants.md has the findings.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from clip_la.attention.spec import AttentionSpec
from clip_la.data.demo import build_demo_data
from clip_la.evaluate.command import EvalOptions, run_evaluation
from clip_la.model_choice import ModelChoice, load_model
from clip_la.report.runs import Run, read_usable_runs
from clip_la.reproduce.trainings import Training, train_all

GAIN: dict[str, Any] = {"kind": "eq7", "gain": "learned", "scale": "length"}
VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {"kind": "softmax"},
    "eq4": {"kind": "eq4"},
    "eq4-raw": {"kind": "eq4", "normalise_qk": False},
    "eq7": {"kind": "eq7"},
    "eq7-length": {"kind": "eq7", "scale": "length"},
    "rms": {"kind": "eq7", "output_norm": "rms"},
    "gain-paper-scale": {"kind": "eq7", "gain": "learned"},
    "gain-rms": {"kind": "eq7", "gain": "learned", "output_norm": "rms"},
    "gain": GAIN,
    "gain-16": {**GAIN, "gain": 16},
    "centred": {**GAIN, "centre_values": True},
    "centred-16": {**GAIN, "gain": 16, "centre_values": True},
    "centred-no-gain": {"kind": "eq7", "scale": "length", "centre_values": True},
}
COMMON: dict[str, Any] = {
    "batch_size": 64,
    "precision": "amp_bf16",
    "wd": 0.1,
    "warmup": 50,
    "grad_clip_norm": 1.0,
    "workers": 0,
    "val_frequency": 0,
    "zeroshot_frequency": 0,
    "save_frequency": 0,
    "log_every_n_steps": 10,
}


FACTORS = (1, 2, 4)
"""Of the training resolution: where models are evaluated by `transfer`."""


def main() -> None:
    arguments = _parse()
    if arguments.command == "train":
        train_all(
            list(_trainings(arguments)),
            arguments.out / "runs",
            processes=arguments.processes,
            accept_non_finite=True,
        )
    groups = read_groups(sorted((arguments.out / "runs").glob("*/")))
    if arguments.command == "transfer":
        tables = [
            format_transfer(setting, groups[setting], arguments.out / "transfer")
            for setting in sorted(groups)
        ]
    else:
        tables = [format_table(setting, groups[setting]) for setting in sorted(groups)]
        plot(groups, [arguments.out / f"variants.{suffix}" for suffix in ("png", "svg")])
    print("\n\n".join(tables))


def _trainings(arguments: argparse.Namespace) -> Iterator[Training]:
    data = _data(arguments)
    grid = itertools.product(arguments.lrs, arguments.seeds, arguments.variants)
    for lr, seed, variant in grid:
        parts = (Path(arguments.model).stem, arguments.image_size, arguments.samples, variant, lr, seed)
        yield Training(
            "-".join((_data_name(data["train_data"]), *map(str, parts))),
            COMMON
            | data
            | {
                "templates": arguments.templates,
                "model": arguments.model,
                "attention": VARIANTS[variant],
                "lr": lr,
                "seed": seed,
                "force_image_size": (arguments.image_size,),
                "train_num_samples": arguments.samples,
                "epochs": 1,
            },
            cost=1.3 if variant == "softmax" else 1.0,
        )


def _data(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.emoji is not None:
        train, val = "{00000..00006}.tar", "00007.tar"
        shards, tree = arguments.emoji / "emoji", arguments.emoji / "zeroshot" / "emoji_fluent"
        paths = {"train_data": shards / train, "val_data": shards / val, "zeroshot": tree}
    else:
        root = arguments.data or arguments.out / "demo"
        if arguments.data is None:
            build_demo_data(root)
        train, val = "train/{00000..00007}.tar", "val/00000.tar"
        paths = {"train_data": root / train, "val_data": root / val, "zeroshot": root / "zeroshot"}
    paths["classnames"] = paths["zeroshot"] / "classnames.txt"
    return {name: str(path) for name, path in paths.items()}


def _data_name(train_data: str) -> str:
    """What a set is called: the name of its folder."""
    folder = Path(train_data).parent
    return folder.parent.name if folder.name == "train" else folder.name


class Setting(NamedTuple):
    """What has to be equal for two variants to be compared."""

    data: str
    model: str
    image_size: int
    samples: int

    def __str__(self) -> str:
        return f"{self.data}, {self.model}, {self.image_size} px, {self.samples:,} samples"


Group = dict[str, dict[float, list[Run]]]
"""Variant -> learning rate -> the finished runs, one a seed."""


def read_groups(folders: Sequence[Path]) -> dict[Setting, Group]:
    """The finished runs among these."""
    groups: dict[Setting, Group] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for run in read_usable_runs(folders)[0]:
        if run.end is not None and run.end.reason == "finished":
            groups[_setting(run)][_variant(run)][float(run.config["lr"])].append(run)
    return groups


def best_rates(group: Group) -> list[tuple[str, float]]:
    """Each variant at the rate of its lowest mean validation loss, best first."""
    best = [
        (variant, min(by_rate, key=lambda lr: _mean(by_rate[lr], "loss")))
        for variant, by_rate in group.items()
    ]
    return sorted(best, key=lambda pair: _mean(group[pair[0]][pair[1]], "loss"))


def _setting(run: Run) -> Setting:
    (size,) = run.config["force_image_size"]
    return Setting(
        _data_name(run.config["train_data"]), Path(str(run.config["model"])).stem, size, run.samples
    )


def _variant(run: Run) -> str:
    by_spec = {str(AttentionSpec.from_config(config)): name for name, config in VARIANTS.items()}
    return by_spec.get(str(run.attention), str(run.attention))


def format_table(setting: Setting, group: Group) -> str:
    """Markdown: the variants at their best learning rate, best first."""
    lines = [
        str(setting),
        "",
        "| variant | best rate (tried) | seeds | training loss | validation loss | retrieval@1 | top-1 |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant, lr in best_rates(group):
        runs = group[variant][lr]
        tried = ", ".join(f"{rate:g}" for rate in sorted(group[variant]))
        columns = (
            _spread([run.epochs[-1].loss for run in runs], ".3f"),
            _spread(_values(runs, "loss"), ".3f"),
            _spread(_recalls(runs), ".1%"),
            _spread(_values(runs, "top1"), ".1%"),
        )
        lines.append(f"| {variant} | {lr:g} ({tried}) | {len(runs)} | {' | '.join(columns)} |")
    return "\n".join(lines)


def format_transfer(setting: Setting, group: Group, folder: Path) -> str:
    """Markdown: held-out top-1 of each variant at its best rate, at several times its resolution."""
    sizes = [factor * setting.image_size for factor in FACTORS]
    lines = [
        str(setting),
        "",
        f"| variant | seeds | {' | '.join(f'top-1 at {size} px' for size in sizes)} |",
        f"|---|---|{'---|' * len(sizes)}",
    ]
    for variant, lr in best_rates(group):
        runs = group[variant][lr]
        columns = (_spread([_top1_at(run, size, folder) for run in runs], ".1%") for size in sizes)
        lines.append(f"| {variant} | {len(runs)} | {' | '.join(columns)} |")
    return "\n".join(lines)


def _top1_at(run: Run, image_size: int, folder: Path) -> float:
    """Zero-shot accuracy on the tree of the run's own evaluation; what is there isn't done again."""
    file = folder / f"{run.path.name}-{image_size}.json"
    if not file.exists():
        options = EvalOptions(
            zeroshot=run.config["zeroshot"],
            classnames=run.config["classnames"],
            templates=run.config["templates"],
            workers=0,
            json=file,
        )
        run_evaluation(load_model(ModelChoice(run.path, image_size=image_size)), options)
    return float(json.loads(file.read_text(encoding="utf-8"))["metrics"]["top1"])


def plot(groups: dict[Setting, Group], paths: Sequence[Path]) -> None:
    """A panel a setting: each run's validation loss against its held-out accuracy, a colour a variant."""
    figure = Figure(figsize=(5 * len(groups), 4.5), layout="constrained")
    colours = {variant: f"C{index}" for index, variant in enumerate(VARIANTS)}
    for index, setting in enumerate(sorted(groups), start=1):
        axes = figure.add_subplot(1, len(groups), index)
        for variant, lr in best_rates(groups[setting]):
            runs = groups[setting][variant][lr]
            accuracies = [100 * value for value in _values(runs, "top1")]
            axes.scatter(_values(runs, "loss"), accuracies, color=colours.get(variant), label=variant)
        axes.set(xlabel="validation loss", ylabel="held-out top-1, %")
        axes.set_title(f"{setting.data}, {setting.model}, {setting.image_size} px", fontsize=10)
        axes.legend(fontsize=8)
    for path in paths:
        figure.savefig(path, dpi=150)


def _values(runs: Sequence[Run], metric: str) -> list[float]:
    """The newest value of a metric in each run."""
    return [[point.metrics[metric] for point in run.evals if metric in point.metrics][-1] for run in runs]


def _recalls(runs: Sequence[Run]) -> list[float]:
    """Recall at 1 of each run on its validation pairs, the mean of both directions."""
    directions = (_values(runs, f"{direction}_recall@1") for direction in ("image_to_text", "text_to_image"))
    return [statistics.fmean(pair) for pair in zip(*directions, strict=True)]


def _mean(runs: Sequence[Run], metric: str) -> float:
    return statistics.fmean(_values(runs, metric))


def _spread(values: Sequence[float], form: str) -> str:
    if len(values) == 1:
        return format(values[0], form)
    return f"{statistics.fmean(values):{form}} ± {statistics.stdev(values):{form}}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("train", "table", "transfer"))
    parser.add_argument("--out", type=Path, required=True)
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--data", type=Path, help="a set of the demo data's layout in their place")
    data.add_argument("--emoji", type=Path, help="folder with emoji/ and zeroshot/ in their place")
    parser.add_argument("--templates", default="photo", help="prompts of the zero-shot evaluation")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--lrs", nargs="+", type=float, default=[5e-4, 1e-3, 2e-3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--model", default="ViT-nano-8", help="a name or a .json model config")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--samples", type=int, default=16_000)
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
