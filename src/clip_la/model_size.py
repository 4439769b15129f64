"""The size of a model from its config alone: parameters of each tower, and floating-point operations.

Formulas; nothing is built or measured. N tokens, w width, L layers, h MLP ratio 4, D head width, E embedding
width, B samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clip_la.attention.spec import AttentionSpec

ModelConfig = Mapping[str, Any]

LAYER_BYTES = 34  # a token and unit of width kept for backward in 16 bits: Korthikanti et al., 2205.05198


class NotEstimatedError(ValueError):
    """A model whose size these formulas don't give."""


@dataclass(frozen=True)
class Tower:
    """One transformer: its sizes, and whether its attention is linear and causal."""

    width: int
    layers: int
    mlp_ratio: float
    head_width: int
    tokens: int
    linear: bool
    causal: bool

    @property
    def layer_parameters(self) -> int:
        """4w^2 + 4w attention, 2hw^2 + (h + 1)w MLP, 4w norms."""
        w, hidden = self.width, int(self.width * self.mlp_ratio)
        return 4 * w * w + 4 * w + 2 * w * hidden + hidden + w + 4 * w

    @property
    def forward_flops(self) -> float:
        """N L (8 w^2 + 4 h w^2 + attention), attention 4 N w, or 4 D w where it is linear and N is above D.

        A causal tile of N <= 128 tokens is formed in full either way, so it counts as N x N.
        """
        w, tokens = self.width, self.tokens
        pairs = self.head_width if self.linear and not (self.causal and tokens <= 128) else tokens
        dense = 8 * w * w + 4 * w * int(w * self.mlp_ratio)
        return float(tokens * self.layers * (dense + 4 * min(pairs, tokens) * w))

    @property
    def activation_bytes(self) -> float:
        """34 N w L: what backward needs without recomputing."""
        return LAYER_BYTES * self.tokens * self.width * self.layers

    @property
    def checkpointed_bytes(self) -> float:
        """4 N w L for the layers' inputs, and one layer recomputed at a time."""
        return self.tokens * self.width * (4 * self.layers + LAYER_BYTES)


@dataclass(frozen=True)
class Shape:
    """Both towers of a model, and what lies around them."""

    image: Tower
    text: Tower
    embed_dim: int
    patch_pixels: int
    vocab_size: int


def model_shape(model: ModelConfig) -> Shape:
    """The sizes of a native ViT's config.

    Raises:
        NotEstimatedError: a tower of another kind.
    """
    vision, text = model["vision_cfg"], model["text_cfg"]
    if "timm_model_name" in vision or "hf_model_name" in text or not isinstance(vision["layers"], int):
        raise NotEstimatedError("only native ViTs and text transformers can be estimated")
    linear = AttentionSpec.from_config(model.get("attention")).kind != "softmax"
    side, patch = _first(vision["image_size"]), vision["patch_size"]
    image = Tower(
        width=vision["width"],
        layers=vision["layers"],
        mlp_ratio=vision.get("mlp_ratio", 4.0),
        head_width=vision.get("head_width", 64),
        tokens=(side // patch) ** 2 + 1,
        linear=linear,
        causal=False,
    )
    words = Tower(
        width=text["width"],
        layers=text["layers"],
        mlp_ratio=text.get("mlp_ratio", 4.0),
        head_width=text["width"] // text["heads"],
        tokens=text["context_length"],
        linear=linear,
        causal=True,
    )
    return Shape(image, words, model["embed_dim"], 3 * patch * patch, text["vocab_size"])


def _first(size: int | list[int] | tuple[int, ...]) -> int:
    return size if isinstance(size, int) else size[0]


def count_tower_parameters(model: ModelConfig) -> dict[str, int]:
    """Of the "image" and the "text" tower, projections included; exact for the shipped models."""
    shape = model_shape(model)
    image, text = shape.image, shape.text
    around_image = (shape.patch_pixels + 1 + image.tokens + 4 + shape.embed_dim) * image.width
    around_text = (shape.vocab_size + text.tokens + 2 + shape.embed_dim) * text.width
    has_gains = model.get("attention", {}).get("gain") == "learned"
    return {
        name: tower.layers * (tower.layer_parameters + has_gains * (tower.width // tower.head_width)) + around
        for name, tower, around in (("image", image, around_image), ("text", text, around_text))
    }


def count_parameters(model: ModelConfig) -> int:
    """Both towers and logit_scale."""
    return sum(count_tower_parameters(model).values()) + 1


def forward_flops(shape: Shape) -> float:
    """One image and one text through their towers: blocks, patch embedding and projections."""
    patches = 2 * shape.patch_pixels * shape.image.width * (shape.image.tokens - 1)
    projections = 2 * shape.embed_dim * (shape.image.width + shape.text.width)
    return shape.image.forward_flops + shape.text.forward_flops + patches + projections


def training_flops(shape: Shape, global_batch: int, recompute: bool) -> float:
    """3 x forward (4 x with gradient checkpointing), and 3 x the two rows of logits, 2 B E each."""
    loss = 3 * 2 * 2 * global_batch * shape.embed_dim
    return (4 if recompute else 3) * forward_flops(shape) + loss
