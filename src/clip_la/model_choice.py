"""Any trained CLIP as a bundle: this package's checkpoints and runs, hub folders, OpenCLIP's own models."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch

from clip_la.bundle import PRECISIONS, ClipBundle, resolve_model_config
from clip_la.checkpoint import CheckpointError, load_bundle
from clip_la.config import ConfigError
from clip_la.openclip import WeightsError, bound_tokenizer_cache

HUB_CONFIG_FILE = "open_clip_config.json"
HUB_WEIGHTS_FILE = "open_clip_model.safetensors"


@dataclass(frozen=True)
class ModelChoice:
    """Which model a command uses: a path, or a name with or without weights of OpenCLIP's.

    Attributes:
        checkpoint: a checkpoint of this package, a run's folder, or an OpenCLIP hub folder.
        model: a model name, or an `hf-hub:` or `local-dir:` reference, in place of `checkpoint`.
        pretrained: with a model name: one of OpenCLIP's tags for it, or a file of weights.
        precision: one of `PRECISIONS`; None for the one that the checkpoint was trained in, else fp32.
        image_size: pixels a side in place of the model's own; position embeddings are resized.
    """

    checkpoint: Path | None = None
    model: str | None = None
    pretrained: str | None = None
    precision: str | None = None
    image_size: int | None = None

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (self.model is None):
            raise ConfigError(
                "give either a checkpoint (file, run folder or hub folder) or --model NAME, not "
                + ("both" if self.model else "neither")
            )
        if self.pretrained is not None and (self.model is None or ":" in self.model):
            raise ConfigError("--pretrained belongs to --model NAME; other models bring their weights along")
        if self.model is not None and self.pretrained is None and ":" not in self.model:
            raise ConfigError(
                f"--model {self.model} has random weights; give --pretrained TAG or FILE as well (OpenCLIP's "
                f"tags for it: {', '.join(open_clip.list_pretrained_tags_by_model(self.model)) or 'none'})"
            )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> ModelChoice:
        """What the command line says; see `add_model_arguments`."""
        return cls(args.checkpoint, args.model, args.pretrained, args.precision, args.force_image_size)

    def __str__(self) -> str:
        return str(self.checkpoint or self.model) + (f", {self.pretrained}" if self.pretrained else "")


def add_model_arguments(parser: argparse.ArgumentParser, *, positional: bool) -> None:
    """The flags of `ModelChoice`; the checkpoint as the first positional or as a flag."""
    what = "checkpoint, run folder (its newest checkpoint), or OpenCLIP hub folder"
    if positional:
        parser.add_argument("checkpoint", type=Path, nargs="?", metavar="CHECKPOINT", help=what)
    else:
        parser.add_argument("--checkpoint", type=Path, metavar="PATH", help=what)
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="in its place: a model of OpenCLIP's or of `clip-la models`, or hf-hub:REPO",
    )
    parser.add_argument(
        "--pretrained", metavar="TAG|FILE", help="weights for --model: OpenCLIP's tag for it, or a file"
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, help="default: the one it was trained in; fp32 where none is known"
    )
    parser.add_argument(
        "--force-image-size",
        type=int,
        metavar="PIXELS",
        help="another image size than it was trained with; its position embeddings are resized",
    )


def load_model(choice: ModelChoice, device: str | torch.device = "auto") -> ClipBundle:
    """The chosen model in evaluation mode.

    Raises:
        CheckpointError, WeightsError, ValueError: it isn't there, or isn't a model; the message says what is.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    path = choice.checkpoint
    if path is None:
        assert choice.model is not None
        return _from_openclip(choice.model, choice, device)
    if (path / HUB_CONFIG_FILE).is_file():
        return _from_openclip(f"local-dir:{path}", choice, device)
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}")
    try:
        return load_bundle(
            path, precision=choice.precision, device=device, force_image_size=choice.image_size
        )
    except CheckpointError as error:
        hint = "; a file of weights alone needs --model NAME --pretrained FILE" if path.is_file() else ""
        raise CheckpointError(f"{error}{hint}") from error


def _from_openclip(model: str, choice: ModelChoice, device: str | torch.device) -> ClipBundle:
    pretrained, precision, image_size = choice.pretrained, choice.precision or "fp32", choice.image_size
    config = resolve_model_config(model, force_image_size=image_size)
    try:
        built, preprocess = open_clip.create_model_from_pretrained(
            model,
            pretrained,
            precision=precision,
            device=device,
            force_image_size=image_size,
            output_dict=True,
        )
        tokenizer = open_clip.get_tokenizer(model)
    except WeightsError:
        raise
    except Exception as error:  # whatever downloads, unpickling and tensor copies lead to
        weights = f" with {pretrained}" if pretrained else ""
        raise WeightsError(f"{model}{weights} can't be loaded: {error}") from error
    bound_tokenizer_cache(tokenizer)
    built.eval()
    preprocess_config = dict(built.visual.preprocess_cfg)
    options = {key: preprocess_config[key] for key in ("mean", "std", "interpolation", "resize_mode")}
    return ClipBundle(
        model=built,
        preprocess_train=open_clip.image_transform(preprocess_config["size"], is_train=True, **options),
        preprocess_val=preprocess,
        tokenizer=tokenizer,
        model_name=Path(model).name if ":" in model else model,
        model_config=config,
        preprocess_config=preprocess_config,
        precision=precision,
        device=torch.device(device),
    )


def probabilities(
    bundle: ClipBundle, image_features: torch.Tensor, label_features: torch.Tensor
) -> torch.Tensor:
    """(n, labels) float32: softmax over the labels, or, of a SigLIP model, each label's own sigmoid.

    Args:
        image_features, label_features: L2-normalised, (n, embed_dim) and (labels, embed_dim).
    """
    model: Any = bundle.model
    with torch.inference_mode():
        logits = model.logit_scale.exp().float() * image_features @ label_features.T
        chosen: torch.Tensor = (
            logits.softmax(dim=-1)
            if model.logit_bias is None
            else (logits + model.logit_bias.float()).sigmoid()
        )
    return chosen
