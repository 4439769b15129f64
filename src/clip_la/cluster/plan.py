"""What a run will take, from its config alone: estimates by the formulas below, nothing is measured.

N tokens, w width, L layers, h MLP ratio 4, D head width, E embedding width, B samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clip_la.attention.spec import AttentionSpec
from clip_la.bundle import resolve_model_config
from clip_la.config import RunConfig

ModelConfig = Mapping[str, Any]

H200_BF16_FLOPS = 989e12  # a second, dense, from NVIDIA's data sheet
# OpenCLIP's docs/PRETRAINED.md gives GPU-hours of its LAION-400M runs on A100 (312e12 bf16 FLOPs a second):
# with the FLOPs below, ViT-B/16's 10,700 hours are 13 % of the peak, ViT-L/14's 50,800 hours 16 %.
PUBLISHED_UTILISATION = 0.15

OPTIMIZER_BYTES = 20  # a parameter: fp32 weight, gradient, DDP's bucket, Adam's two moments
LAYER_BYTES = 34  # a token and unit of width kept for backward in 16 bits: Korthikanti et al., 2205.05198
CHECKPOINT_BYTES = 12  # a parameter on disk: fp32 weight and Adam's two moments
LOGIT_BYTES = 12  # an entry of a logit matrix: 16-bit logits, fp32 log-softmax and gradient, 16-bit gradient
FIXED_BYTES = 3 * 2**30  # CUDA context, NCCL buffers, allocator's slack


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


def count_parameters(model: ModelConfig) -> int:
    """Exact for the shipped models: blocks, embeddings, norms, projections and logit_scale."""
    shape = model_shape(model)
    image, text = shape.image, shape.text
    around_image = (shape.patch_pixels + 1 + image.tokens + 4 + shape.embed_dim) * image.width
    around_text = (shape.vocab_size + text.tokens + 2 + shape.embed_dim) * text.width
    gains = 0
    if model.get("attention", {}).get("gain") == "learned":
        gains = sum(tower.layers * (tower.width // tower.head_width) for tower in (image, text))
    blocks = image.layers * image.layer_parameters + text.layers * text.layer_parameters
    return blocks + around_image + around_text + gains + 1


def checkpoint_bytes(num_parameters: int) -> int:
    """Size of one checkpoint file with Adam's moments."""
    return CHECKPOINT_BYTES * num_parameters


def num_kept_checkpoints(config: RunConfig) -> int:
    """Files at the run's end: one every --save-frequency epochs, the rolling ones, one being written."""
    kept = config.epochs // config.save_frequency if config.save_frequency else 1
    return kept + config.keep_last + 1


@dataclass(frozen=True)
class Plan:
    """What a run comes to on `num_gpus` GPUs. All but the first four are estimates.

    Attributes:
        global_batch: samples a step.
        num_steps, num_samples: of the whole run; None where sizes.json must be read first.
        num_parameters: of the model.
        sample_flops: floating-point operations of one training sample, recomputing included.
        gpu_bytes: memory a GPU.
        checkpoint_bytes: one file.
        num_kept_checkpoints: files at the end.
    """

    global_batch: int
    num_steps: int
    num_samples: int
    num_parameters: int
    sample_flops: float
    gpu_bytes: float
    checkpoint_bytes: int
    num_kept_checkpoints: int

    def hours(self, num_gpus: int, utilisation: float) -> float:
        """samples x FLOPs / (GPUs x peak x utilisation)."""
        rate = num_gpus * H200_BF16_FLOPS * utilisation
        return self.num_samples * self.sample_flops / rate / 3600


def make_plan(config: RunConfig, num_gpus: int, epoch_samples: int) -> Plan:
    """The plan of a run.

    Args:
        config: the run.
        num_gpus: one rank each.
        epoch_samples: global samples of a virtual epoch.
    """
    model = resolve_model_config(
        config.model,
        attention=config.attention,
        force_image_size=config.force_image_size,
        force_context_length=config.force_context_length,
    )
    shape, num_parameters = model_shape(model), count_parameters(model)
    global_batch = config.batch_size * config.accum_freq * num_gpus
    steps_an_epoch = -(-epoch_samples // global_batch)
    num_steps = config.epochs * steps_an_epoch
    return Plan(
        global_batch=global_batch,
        num_steps=num_steps,
        num_samples=num_steps * global_batch,
        num_parameters=num_parameters,
        sample_flops=training_flops(shape, global_batch, config.grad_checkpointing),
        gpu_bytes=memory_bytes(config, shape, num_parameters, global_batch),
        checkpoint_bytes=checkpoint_bytes(num_parameters),
        num_kept_checkpoints=num_kept_checkpoints(config),
    )


def forward_flops(shape: Shape) -> float:
    """One image and one text through their towers: blocks, patch embedding and projections."""
    patches = 2 * shape.patch_pixels * shape.image.width * (shape.image.tokens - 1)
    projections = 2 * shape.embed_dim * (shape.image.width + shape.text.width)
    return shape.image.forward_flops + shape.text.forward_flops + patches + projections


def training_flops(shape: Shape, global_batch: int, recompute: bool) -> float:
    """3 x forward (4 x with gradient checkpointing), and 3 x the two rows of logits, 2 B E each."""
    loss = 3 * 2 * 2 * global_batch * shape.embed_dim
    return (4 if recompute else 3) * forward_flops(shape) + loss


def memory_bytes(config: RunConfig, shape: Shape, num_parameters: int, global_batch: int) -> float:
    """Weights, gradients and moments; activations of a micro-batch; logits; a fixed part."""
    towers = (shape.image, shape.text)
    if config.grad_checkpointing:
        sample = sum(tower.checkpointed_bytes for tower in towers)
    else:
        sample = sum(tower.activation_bytes for tower in towers)
    if config.precision == "fp32":
        sample *= 2
    columns = global_batch if config.local_loss else global_batch * global_batch / config.batch_size
    logits = 2 * LOGIT_BYTES * config.batch_size * columns
    return OPTIMIZER_BYTES * num_parameters + sample * config.batch_size + logits + FIXED_BYTES
