"""What the H200 scale submits to a Slurm cluster, and what that costs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from clip_la.cluster.plan import PUBLISHED_UTILISATION, make_plan
from clip_la.config_sources import load_run_config
from clip_la.report.runs import RunError, read_run
from clip_la.report.text import count, setting
from clip_la.reproduce.kinds import RECOMMENDED_KIND, attention_of

KINDS = {"softmax": "softmax", "eq4": "la-eq4", "eq7": "la", RECOMMENDED_KIND: f"la-{RECOMMENDED_KIND}"}
"""Kind -> the ending of its configs' names."""
SHIPPED_SIZES = ("s", "b", "l")
CONVERGENCE_SIZE = "b"
_EXTRA_KINDS = ("softmax", "eq7", RECOMMENDED_KIND)
_BENCH_LENGTHS = tuple(4**n for n in range(5, 12))  # 1,024 to 4,194,304 tokens


@dataclass(frozen=True)
class Size:
    """A ViT-X/16 of 12 layers, heads of 64."""

    width: int
    text_width: int
    embed_dim: int


EXTRA_SIZES = {"ti": Size(192, 256, 256), "m": Size(512, 512, 512)}
"""With S, B and L these make five sizes: three can't show that a power law holds."""


@dataclass(frozen=True)
class ClusterRun:
    """One reproduction on a cluster.

    Attributes:
        out: a folder that all nodes see.
        repo: a clone of the repository, for configs/ and slurm/.
        flags: of `clip-la train` for all runs: data and evaluation.
        nodes, gpus_per_node: of each job.
        sbatch: options for every job, such as the account.
        panels: which of time, convergence and fit.
    """

    out: Path
    repo: Path
    flags: Mapping[str, str]
    nodes: int
    gpus_per_node: int
    sbatch: Sequence[str]
    panels: tuple[str, ...]

    @property
    def runs(self) -> Path:
        """Folder of the run folders."""
        return self.out.resolve() / "runs"

    def folder(self, size: str, kind: str) -> Path:
        """Of a run, which has its config's name."""
        return self.runs / f"vit-{size}-16-{KINDS[kind]}"


@dataclass(frozen=True)
class Command:
    """What is run to submit jobs; `environment` is added to the caller's."""

    title: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.argv)])


def configs_of(run: ClusterRun) -> dict[tuple[str, str], Path]:
    """(size, kind) -> run config; those of the extra sizes are written into `out`."""
    shipped = run.repo.resolve() / "configs" / "laion400m"
    paths = {
        (size, kind): shipped / f"vit-{size}-16-{ending}.yaml"
        for size in SHIPPED_SIZES
        for kind, ending in KINDS.items()
    }
    if "fit" not in run.panels:
        return {key: path for key, path in paths.items() if key[0] == CONVERGENCE_SIZE}
    for size in EXTRA_SIZES:
        for kind in _EXTRA_KINDS:
            paths[size, kind] = _write_config(run, size, kind, shipped / "base.yaml")
    return paths


def _write_config(run: ClusterRun, size: str, kind: str, base: Path) -> Path:
    """As configs/laion400m has them: the recipe of all sizes, and the model."""
    models, configs = run.out.resolve() / "models", run.out.resolve() / "configs"
    for folder in (models, configs):
        folder.mkdir(parents=True, exist_ok=True)
    model = models / f"ViT-{size.capitalize()}-16-{KINDS[kind]}.json"
    model.write_text(json.dumps(extra_model(size, kind), indent=2) + "\n", encoding="utf-8")
    path = configs / f"{run.folder(size, kind).name}.yaml"
    path.write_text(
        yaml.safe_dump({"base": str(base), "model": str(model)}, sort_keys=False), encoding="utf-8"
    )
    return path


def extra_model(size: str, kind: str) -> dict[str, Any]:
    """The model config of an extra size."""
    chosen, attention = EXTRA_SIZES[size], attention_of(kind)
    config: dict[str, Any] = {
        "embed_dim": chosen.embed_dim,
        "vision_cfg": {"image_size": 224, "layers": 12, "width": chosen.width, "patch_size": 16},
        "text_cfg": {
            "context_length": 77,
            "vocab_size": 49408,
            "width": chosen.text_width,
            "heads": chosen.text_width // 64,
            "layers": 12,
        },
    }
    return config if attention is None else {**config, "attention": dict(attention)}


def commands_of(run: ClusterRun) -> Iterator[Command]:
    """What a person runs on the cluster, in order."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in run.flags.items()]
    if "train_data" not in run.flags:
        flags = ["--train-data=SHARDS", *flags]
    gpus = run.gpus_per_node
    options = [f"--nodes={run.nodes}", f"--gpus-per-node={gpus}", f"--ntasks-per-node={gpus}", *run.sbatch]
    compare = ["bash", str(run.repo / "slurm" / "compare.sbatch"), *options]
    groups: dict[str, list[str]] = {}
    if set(run.panels) & {"convergence", "fit"}:
        for (size, _), path in configs_of(run).items():
            groups.setdefault("extra" if size in EXTRA_SIZES else "shipped", []).append(str(path))
    for group, paths in groups.items():
        argv = (*compare, "--", *flags, f"--logs={run.runs}")
        yield Command(f"{len(paths)} trainings, {group} sizes", argv, {"CLIP_LA_CONFIGS": " ".join(paths)})
    if "time" in run.panels:
        lengths = " ".join(map(str, _BENCH_LENGTHS))
        measure = "clip-la bench --level operator --dtype bfloat16 --heads 1 --batch-size 1"
        script = f"{measure} --lengths {lengths} --out {shlex.quote(str(run.out.resolve() / 'time'))}"
        options = [
            "--job-name=clip_la_bench",
            "--nodes=1",
            "--gpus-per-node=1",
            "--time=02:00:00",
            *run.sbatch,
        ]
        yield Command("times, on one GPU", ("sbatch", *options, f"--wrap={script}"), {})


def format_plan(run: ClusterRun, commands: Sequence[Command]) -> str:
    """What it takes and costs, and the commands."""
    lines = [
        f"LAION-400M on {run.nodes} nodes x {run.gpus_per_node} H200 a training. It needs a Slurm cluster, "
        "the shards on storage that all nodes see, and the time below.",
        "",
        f"{'run':28s}{'parameters':>12s}{'samples':>10s}{'hours':>9s}{'GPU-hours':>11s}  state",
    ]
    num_gpus = run.nodes * run.gpus_per_node
    total = 0.0
    chosen = configs_of(run) if set(run.panels) & {"convergence", "fit"} else {}
    for (size, kind), path in chosen.items():
        config = load_run_config(path, run.flags)
        plan = make_plan(config, num_gpus, int(config.train_num_samples or 0))
        hours = plan.hours(num_gpus, PUBLISHED_UTILISATION)
        total += hours * num_gpus
        lines.append(
            f"{path.stem:28s}{count(plan.num_parameters):>12s}{count(plan.num_samples):>10s}{hours:9,.0f}"
            f"{hours * num_gpus:11,.0f}  {state_of(run.folder(size, kind))}"
        )
    lines += [
        f"in all about {total:,.0f} GPU-hours: estimates at {PUBLISHED_UTILISATION:.0%} of an H200's peak, "
        "as OpenCLIP's published LAION-400M runs had of theirs",
        "",
        *(f"{command.title}:\n  {command}" for command in commands),
    ]
    return "\n".join(lines)


def state_of(folder: Path) -> str:
    """Of a run, in a word or two: finished, how far, or why it can't be read."""
    if not (folder / "metrics.jsonl").exists():
        return "not started"
    try:
        run = read_run(folder)
    except RunError as error:
        return f"unreadable: {error}"
    if run.end is not None and run.end.reason == "finished":
        return "finished"
    total = run.start.get("samples_total")
    return f"{run.samples / total:.0%} done" if total else f"{setting(run.samples)} samples done"
