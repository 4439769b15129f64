"""The kinds of attention that are compared, and models of several sizes for each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clip_la.bundle import resolve_model_config

RECOMMENDED = "ViT-nano-8-LA-centred"
"""The linear model that this package recommends, in the size that a CPU trains."""

RECOMMENDED_KIND = RECOMMENDED.removeprefix("ViT-nano-8-LA-")

MODELS = {
    "softmax": "ViT-nano-8",
    "eq4": "ViT-nano-8-LA-eq4",
    "eq7": "ViT-nano-8-LA",
    RECOMMENDED_KIND: RECOMMENDED,
}
"""Kind -> its registered nano model."""

IMAGE_SIZE = 32
_HEAD_WIDTH = 32
_IMAGE_LAYERS, _TEXT_LAYERS = 6, 4  # as in the nano models


def attention_of(kind: str) -> Mapping[str, Any] | None:
    """The `attention` entry of a kind's model config; None for softmax."""
    attention: Mapping[str, Any] | None = resolve_model_config(MODELS[kind]).get("attention")
    return attention


def sized_model(kind: str, width: int) -> dict[str, Any]:
    """A model config whose size is set by the width of both towers alone, as S and B are in the paper.

    Args:
        kind: of attention.
        width: a multiple of the head width, 32.
    """
    config: dict[str, Any] = {
        "embed_dim": 128,
        "vision_cfg": {
            "image_size": IMAGE_SIZE,
            "layers": _IMAGE_LAYERS,
            "width": width,
            "patch_size": 8,
            "head_width": _HEAD_WIDTH,
        },
        "text_cfg": {
            "context_length": 24,
            "vocab_size": 49408,
            "width": width,
            "heads": width // _HEAD_WIDTH,
            "layers": _TEXT_LAYERS,
        },
    }
    attention = attention_of(kind)
    return config if attention is None else {**config, "attention": dict(attention)}


def write_sized_models(
    folder: Path, kinds: Sequence[str], widths: Sequence[int]
) -> dict[tuple[str, int], Path]:
    """Model configs as files that `clip-la train --model` takes; (kind, width) -> path."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for kind in kinds:
        for width in widths:
            path = paths[kind, width] = folder / f"width-{width}-{kind}.json"
            path.write_text(json.dumps(sized_model(kind, width), indent=2) + "\n", encoding="utf-8")
    return paths
