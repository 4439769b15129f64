"""A run's evaluators: those of the flags and those that the config lists, each with its own clock."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from clip_la.config import ConfigError, RunConfig
from clip_la.evaluate import Evaluator
from clip_la.evaluate.caption_retrieval import CaptionRetrieval
from clip_la.evaluate.ranks import RanksError, failing_together
from clip_la.evaluate.spec import EvaluatorSpec, read_specs
from clip_la.evaluate.validation import ValidationLoss
from clip_la.evaluate.zeroshot import ZeroShot
from clip_la.train.specs import data_spec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScheduledEvaluator:
    """An evaluator and how often it runs; always at the end of a run.

    Attributes:
        every_epochs: (virtual) epochs between evaluations; 0 for none but the last.
        every_samples: global samples between them, in place of `every_epochs`.
    """

    evaluator: Evaluator
    every_epochs: int = 1
    every_samples: int | None = None

    def is_due(self, before: int, after: int, epoch_samples: int) -> bool:
        """Whether the step from `before` to `after` global samples completed an interval."""
        every = self.every_samples or self.every_epochs * epoch_samples
        return every > 0 and after // every > before // every


def build_evaluators(config: RunConfig, *, must_build: bool = True) -> list[ScheduledEvaluator]:
    """All evaluators of a run. Called by all ranks together.

    Args:
        must_build: raise where one can't be built. Otherwise that is reported and the others are built: a run
            that continues doesn't end because a disk with a validation set is gone.

    Raises:
        ValueError, OSError: the data or classes of one can't be used.
        RanksError: on all ranks, where that happened on some of several.
        ConfigError: two of them have the same name.
    """
    evaluators = []
    for spec in _specs(config):
        try:
            with failing_together():
                evaluator = _build(spec, config)
        except (ValueError, OSError, RanksError) as error:
            if must_build:
                raise
            logger.error("an evaluation is left out of this run: %s of %s: %s", spec.kind, spec.data, error)
        else:
            every_epochs = 1 if spec.every_epochs is None else spec.every_epochs
            evaluators.append(ScheduledEvaluator(evaluator, every_epochs, spec.every_samples))
    _refuse_equal_names([scheduled.evaluator.name for scheduled in evaluators])
    return evaluators


def _specs(config: RunConfig) -> Sequence[EvaluatorSpec]:
    specs = []
    if config.val_data:
        validation = EvaluatorSpec(
            "validation",
            config.val_data,
            every_epochs=config.val_frequency if config.val_every_samples is None else None,
            every_samples=config.val_every_samples,
            block_size=config.val_block_size,
            num_samples=config.val_num_samples,
        )
        specs.append(validation)
    if config.zeroshot:
        zero_shot = EvaluatorSpec(
            "zeroshot",
            config.zeroshot,
            every_epochs=config.zeroshot_frequency if config.zeroshot_every_samples is None else None,
            every_samples=config.zeroshot_every_samples,
            classnames=config.classnames,
            templates=config.templates,
        )
        specs.append(zero_shot)
    return (*specs, *read_specs(config.evaluators))


def _build(spec: EvaluatorSpec, config: RunConfig) -> Evaluator:
    if spec.kind == "validation":
        data = replace(data_spec(config, spec.data), num_samples=spec.num_samples)
        if spec.batch_size is not None:
            data = replace(data, batch_size=spec.batch_size)
        return ValidationLoss(data, name=spec.name or "validation", block_size=spec.block_size)
    batch_size = spec.batch_size or 64
    if spec.kind == "retrieval":
        return CaptionRetrieval(
            spec.data,
            images=spec.images,
            split=spec.split,
            batch_size=batch_size,
            workers=config.workers,
            name=spec.name,
        )
    return ZeroShot(
        spec.data,
        spec.classnames,
        spec.templates,
        batch_size=batch_size,
        workers=config.workers,
        numeric_labels=spec.numeric_labels,
        allow_missing_classes=spec.allow_missing_classes,
        allow_unknown_folders=spec.allow_unknown_folders,
        name=spec.name,
    )


def _refuse_equal_names(names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"two evaluations are called {twice[0]}; give one of them another `name`")
