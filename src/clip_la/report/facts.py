"""What a run's model comes to: floating-point operations a sample, and parameters of each tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clip_la.model_size import (
    NotEstimatedError,
    count_parameters,
    count_tower_parameters,
    model_shape,
    training_flops,
)
from clip_la.report.runs import Run

_SAME_SIZE = 0.01


@dataclass(frozen=True)
class ModelFacts:
    """Of one run's model.

    Attributes:
        sample_flops: of training on one sample, three forward passes: what gradient checkpointing
            computes again is not counted. None where it can't be estimated.
        why_no_flops: the reason then.
        parameters: "image", "text" and "total" -> number; without what isn't known.
    """

    sample_flops: float | None
    why_no_flops: str | None
    parameters: Mapping[str, int]


def model_facts(run: Run) -> ModelFacts:
    """The facts of a run's model: as it recorded them, else from its config."""
    recorded = {**(run.start.get("tower_parameters") or {}), "total": run.start.get("num_parameters")}
    parameters = {name: number for name, number in recorded.items() if number is not None}
    if run.start.get("sample_flops") is not None:
        return ModelFacts(run.start["sample_flops"], None, parameters)
    try:
        config = _model_config(run)
        global_batch = run.start.get("global_batch_size") or 1
        flops = training_flops(model_shape(config), global_batch, recompute=False)
    except (NotEstimatedError, ValueError, KeyError, TypeError) as error:
        return ModelFacts(None, str(error), parameters)
    return ModelFacts(flops, None, {**count_tower_parameters(config), **parameters})


def _model_config(run: Run) -> dict[str, Any]:
    """Of the model that was trained.

    Raises:
        NotEstimatedError: it can't be the model, by its number of parameters, or drops patches.
        ValueError: no such model.
    """
    from clip_la.bundle import resolve_model_config  # imports OpenCLIP, which takes seconds

    config = resolve_model_config(
        str(run.config.get("model")),
        attention=run.attention.to_config(),
        force_image_size=run.config.get("force_image_size"),
        force_context_length=run.config.get("force_context_length"),
        force_patch_dropout=run.config.get("force_patch_dropout"),
    )
    if config["vision_cfg"].get("patch_dropout"):
        raise NotEstimatedError("it drops patches in training")
    counted, recorded = count_parameters(config), run.start.get("num_parameters")
    if recorded is not None and abs(counted - recorded) > _SAME_SIZE * recorded:
        raise NotEstimatedError(
            f"its config gives {counted:,} parameters and the run recorded {recorded:,}: not the same model"
        )
    return config
