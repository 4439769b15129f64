"""What is known of how a model was trained: from its checkpoint, and from the run's folder around it."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clip_la import checkpoint
from clip_la.report.runs import EvalPoint, Run, RunError, read_run
from clip_la.report.summary import smooth_losses

logger = logging.getLogger(__name__)

_URL = re.compile(r"(?P<scheme>[a-z0-9+.-]+)://(?:[^/@]*@)?(?P<rest>[^?#]*)", re.IGNORECASE)


@dataclass(frozen=True)
class Facts:
    """How a checkpoint came about.

    Attributes:
        file: the checkpoint's name.
        samples, samples_total: global samples seen at it, and planned.
        config: the run's settings; paths are shortened (`public_text`).
        versions: of Python and packages, when it was saved.
        lost_samples: dropped for a cause, over all ranks.
        train_loss: smoothed training loss at the checkpoint; None where the run's folder isn't there.
        skipped_steps: steps left out because loss or gradient was not finite; None likewise.
        evaluations: the last of each name at or before the checkpoint.
    """

    file: str
    samples: int
    samples_total: int
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    lost_samples: int
    train_loss: float | None = None
    skipped_steps: int | None = None
    evaluations: tuple[EvalPoint, ...] = field(default=())


def read_facts(path: Path) -> Facts:
    """The facts of a checkpoint file; figures come from the run's folder, where it still lies in one.

    Raises:
        CheckpointError: not a checkpoint of this package.
    """
    saved = checkpoint.read(path)
    facts = Facts(
        file=path.name,
        samples=saved["progress"]["samples"],
        samples_total=saved["clock"]["total_samples"],
        config={key: public_text(value) for key, value in saved["config"].items()},
        versions=saved["versions"],
        lost_samples=sum(sum(rank["lost"].values()) for rank in saved["ranks"]),
    )
    folder = path.resolve().parent.parent
    if not (folder / "metrics.jsonl").is_file():
        return facts
    try:
        run = read_run(folder)
    except RunError as error:
        logger.warning("the model card has no figures of the run: %s", error)
        return facts
    return _with_figures(facts, run)


def _with_figures(facts: Facts, run: Run) -> Facts:
    train = [point for point in run.train if point.samples <= facts.samples]
    loss = float(smooth_losses(train)[-1]) if train else math.nan
    latest: dict[str, EvalPoint] = {}
    for point in sorted(run.evals, key=lambda point: point.samples):
        if point.samples <= facts.samples:
            latest[point.name] = point
    return Facts(
        **{
            **vars(facts),
            "train_loss": loss if train else None,
            "skipped_steps": train[-1].skipped_steps if train else None,
            "evaluations": tuple(latest.values()),
        }
    )


def public_text(value: Any) -> Any:
    """A setting as it may be published: of a path its last two parts, of a URL no login and no query.

    Anything but text stays as it is.
    """
    if isinstance(value, (list, tuple)):
        return [public_text(item) for item in value]
    if not isinstance(value, str) or not ("/" in value or value.startswith("pipe:")):
        return value
    return "::".join(_public_part(part.strip()) for part in value.split("::"))


def _public_part(part: str) -> str:
    if part.startswith("pipe:"):
        return "pipe:(a command)"
    if match := _URL.match(part):
        return f"{match['scheme']}://{match['rest']}"
    return "/".join(Path(part).parts[-2:]) if "/" in part else part
