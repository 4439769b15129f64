"""The CPU scale: time, convergence and fit on this machine, in minutes; run again, it goes on.

OUT/data/                  generated pairs
OUT/runs/                  run folders of the trainings, with NAME.yaml and NAME.log beside them
OUT/models/                model configs of the fit's sizes
OUT/time/, convergence/, fit/      figures and tables
OUT/reproduction.html      one page of everything; .md and .json beside it
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from clip_la.bench.command import machine_facts
from clip_la.config import ConfigError
from clip_la.report.text import duration
from clip_la.reproduce.budget import FULL, QUICK, Budget
from clip_la.reproduce.clock import seconds_taken, timed
from clip_la.reproduce.convergence_panel import convergence_panel, read_curves
from clip_la.reproduce.dataset import DataSet, generated
from clip_la.reproduce.estimate import estimated_seconds, sample_seconds, sized_sample_seconds
from clip_la.reproduce.fit_panel import fit_panel
from clip_la.reproduce.kinds import IMAGE_SIZE, MODELS, RECOMMENDED, write_sized_models
from clip_la.reproduce.panel import Panel
from clip_la.reproduce.settings import learning_rate, training_flags
from clip_la.reproduce.time_panel import time_panel
from clip_la.reproduce.trainings import Training, train_all
from clip_la.reproduce.write import write_panels

logger = logging.getLogger(__name__)

QUICK_WARNING = (
    "A quick run: it shows that every part works. Its budget is too small for its numbers to mean anything."
)


@dataclass(frozen=True)
class CpuRun:
    """One reproduction on this machine.

    Attributes:
        out: its folder.
        quick: with the budget of a smoke test.
        panels: which of time, convergence and fit.
        processes: trainings at a time, one thread each.
        data: a person's own; None generates it.
    """

    out: Path
    quick: bool
    panels: tuple[str, ...]
    processes: int
    data: DataSet | None

    @property
    def budget(self) -> Budget:
        """What is measured and trained."""
        return QUICK if self.quick else FULL

    @property
    def clock(self) -> Path:
        """Where the time that was taken is kept."""
        return self.out / "seconds.json"


def reproduce(run: CpuRun) -> tuple[list[Panel], list[Path]]:
    """Measure, train, fit and write what `run` asks for; the panels and the files written.

    Raises:
        ConfigError: the folder holds a reproduction with other options.
        TrainingFailedError, TrainingsStoppedError: as `train_all`.
    """
    _claim_folder(run.out, {"quick": run.quick, "data": run.data and asdict(run.data)})
    _announce(run)
    makers = {"time": _time, "convergence": _convergence, "fit": _fit}
    panels = []
    for name in run.panels:
        with timed(run.clock, name):
            panel = makers[name](run)
        panels.append(_with_times(panel, run))
    return panels, write_panels(panels, _about(run), QUICK_WARNING if run.quick else None, run.out)


def _claim_folder(out: Path, options: Mapping[str, Any]) -> None:
    """Note the options of a new folder; refuse one with others."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "options.json"
    if file.exists():
        found = json.loads(file.read_text(encoding="utf-8"))
        differ = [
            f"{key} {found.get(key)!r}, now {value!r}"
            for key, value in options.items()
            if found.get(key) != value
        ]
        if differ:
            raise ConfigError(
                f"{out} holds a reproduction with other options: {'; '.join(differ)}; give another --out, or "
                "remove it"
            )
    else:
        file.write_text(json.dumps(dict(options), indent=2) + "\n", encoding="utf-8")


def _announce(run: CpuRun) -> None:
    seconds = estimated_seconds(run.budget, run.processes)
    parts = ", ".join(f"{name} {duration(seconds[name])}" for name in run.panels)
    total = duration(sum(seconds[name] for name in run.panels))
    logger.info("estimate: %s; %s in all, on %d idle cores", parts, total, run.processes)
    logger.info("everything goes to %s; stopped or killed, the same command goes on", run.out)


def _time(run: CpuRun) -> Panel:
    return time_panel(run.budget, run.out / "time")


def _convergence(run: CpuRun) -> Panel:
    budget, data = run.budget, _data(run)
    flags = {**training_flags(budget.convergence_samples, budget.num_points), **data.flags}
    trainings = {
        (kind, seed): Training(
            f"{kind}-seed{seed}", {**flags, "model": model, "seed": seed}, cost=sample_seconds(kind)
        )
        for seed in budget.seeds
        for kind, model in MODELS.items()
    }
    folders = _train(run, trainings.values(), "convergence")
    by_kind = {kind: [folders[trainings[kind, seed].name] for seed in budget.seeds] for kind in MODELS}
    facts = {
        "Data": data.description,
        "Sizes": ", ".join(f"{kind} {model}" for kind, model in MODELS.items())
        + f"; {IMAGE_SIZE} px, 17 tokens",
        **_training_facts(flags, f"{budget.num_points} times along a training; zero-shot after the last"),
        "Learning rate": f"{flags['lr']:g} for all",
        "Seeds": f"{', '.join(map(str, budget.seeds))}: of weights and of the order of the data",
    }
    return convergence_panel(read_curves(by_kind), facts, run.out / "convergence")


def _fit(run: CpuRun) -> Panel:
    budget, data = run.budget, _data(run)
    flags = {
        **training_flags(budget.fit_samples, num_points=1),
        "train_data": data.train,
        "val_data": data.val,
    }
    models = write_sized_models(run.out / "models", budget.fit_kinds, budget.fit_widths)
    trainings = [
        Training(
            f"width{width}-{kind}-seed{seed}",
            {**flags, "model": str(models[kind, width]), "lr": learning_rate(width), "seed": seed},
            cost=sized_sample_seconds(kind, width),
        )
        for width in sorted(budget.fit_widths, reverse=True)  # the longest first, so that none is left alone
        for kind in budget.fit_kinds
        for seed in budget.fit_seeds
    ]
    folders = _train(run, trainings, "fit")
    facts = {
        "Data": data.description,
        "Sizes": f"towers of width {', '.join(map(str, budget.fit_widths))}, 6 layers for images and 4 for "
        "text, as in the nano model",
        **_training_facts(flags, "after the last sample"),
        "Learning rate": ", ".join(f"{learning_rate(width):.2g}" for width in budget.fit_widths)
        + " in that order, for all kinds: beyond a width of 64 in inverse proportion to it",
        "Seeds": f"{', '.join(map(str, budget.fit_seeds))}, equal for all sizes and kinds",
    }
    return fit_panel(list(folders.values()), facts, run.out / "fit")


def _data(run: CpuRun) -> DataSet:
    return run.data or generated(run.out / "data", run.budget.num_pairs)


def _train(run: CpuRun, trainings: Iterable[Training], title: str) -> dict[str, Path]:
    chosen = list(trainings)
    folders = train_all(
        chosen, run.out / "runs", processes=run.processes, keep_checkpoints=False, title=title
    )
    return {training.name: folder for training, folder in zip(chosen, folders, strict=True)}


def _training_facts(flags: Mapping[str, Any], held_out: str) -> dict[str, str]:
    return {
        "Budget": f"{flags['train_num_samples']:,} samples a training, batch {flags['batch_size']}, "
        f"{flags['warmup']} steps of warm-up and a cosine, {flags['precision']}",
        "Held out": f"the loss tells 256 pairs apart, {held_out}",
    }


def _with_times(panel: Panel, run: CpuRun) -> Panel:
    estimate = estimated_seconds(run.budget, run.processes)[panel.name]
    taken = seconds_taken(run.clock, panel.name)
    text = f"{duration(taken)}; the estimate for {run.processes} idle cores was {duration(estimate)}"
    return replace(panel, facts={**panel.facts, "Time taken": text})


def _about(run: CpuRun) -> dict[str, Any]:
    facts = machine_facts(torch.device("cpu"))
    budget = "quick" if run.quick else "full"
    return {
        "Made with": f"clip-la reproduce, {budget} CPU scale, clip_la {facts['clip_la']}, "
        f"torch {facts['torch']}, {facts['date']}",
        "Machine": f"{facts['machine']}, {facts['cores']} cores; {run.processes} trainings at a time, one "
        "thread each",
        "Variants": f"Eq. 4 and Eq. 7 as the paper has them; recommended here: {RECOMMENDED}",
        "Not run": "LAION-400M, ImageNet, and any model larger than those below: that takes a cluster "
        "(clip-la reproduce --scale h200)",
    }
