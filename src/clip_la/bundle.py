"""A CLIP model with its transforms and tokenizer, built from a model config through OpenCLIP's public API."""

from __future__ import annotations

import difflib
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import open_clip
import torch
from PIL import Image
from torch import Tensor, nn

from clip_la.attention.spec import AttentionSpec
from clip_la.openclip import WeightsError, bound_tokenizer_cache, list_linear_models

ModelConfig = dict[str, Any]
PRECISIONS = ("fp32", "amp", "amp_bf16", "amp_bfloat16", "bf16", "fp16", "pure_bf16", "pure_fp16")
_AMP_DTYPES = {"amp": torch.float16, "amp_bf16": torch.bfloat16, "amp_bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ClipBundle:
    """A model with everything needed to run it on pictures and texts.

    Attributes:
        model: CLIP or CustomTextCLIP; `model(images, texts)` returns a dict.
        preprocess_train, preprocess_val: PIL image -> float32 (3, height, width).
        tokenizer: a string or list of n strings -> int64 (n, context_length).
        model_name: the name that people know the model by.
        model_config: OpenCLIP's model config, `attention` included, all overrides applied.
        preprocess_config: OpenCLIP's preprocess config (size, mean, std, interpolation, ...).
        precision: one of OpenCLIP's precision names.
        device: where the model lies.
    """

    model: nn.Module
    preprocess_train: Callable[[Image.Image], Tensor]
    preprocess_val: Callable[[Image.Image], Tensor]
    tokenizer: Callable[[str | list[str]], Tensor]
    model_name: str
    model_config: ModelConfig
    preprocess_config: dict[str, Any]
    precision: str
    device: torch.device

    @property
    def spec(self) -> AttentionSpec:
        """The attention of both towers."""
        return AttentionSpec.from_config(self.model_config.get("attention"))

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype that images are cast to, None for none."""
        dtype: torch.dtype | None = open_clip.get_input_dtype(self.precision)
        return dtype

    @property
    def attention_dtype(self) -> torch.dtype:
        """The dtype that attention gets its q, k and v in."""
        return _AMP_DTYPES.get(self.precision) or self.input_dtype or torch.float32

    def autocast(self) -> AbstractContextManager[Any]:
        """The autocast context of this precision; does nothing for those without."""
        dtype = _AMP_DTYPES.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    @torch.inference_mode()
    def encode_image(self, images: Tensor) -> Tensor:
        """(n, 3, height, width) -> L2-normalised float32 features (n, embed_dim) on the device."""
        with self.autocast():
            features = self.model.encode_image(images.to(self.device, self.input_dtype))  # type: ignore[operator]
        return nn.functional.normalize(features.float(), dim=-1)

    @torch.inference_mode()
    def encode_text(self, tokens: Tensor) -> Tensor:
        """Token ids (n, context_length) -> L2-normalised float32 features (n, embed_dim) on the device."""
        with self.autocast():
            features = self.model.encode_text(tokens.to(self.device))  # type: ignore[operator]
        return nn.functional.normalize(features.float(), dim=-1)


def resolve_model_config(
    model: str,
    *,
    attention: Mapping[str, Any] | str | None = None,
    force_image_size: int | Sequence[int] | None = None,
    force_context_length: int | None = None,
    force_patch_dropout: float | None = None,
    force_quick_gelu: bool = False,
    force_custom_text: bool = False,
) -> ModelConfig:
    """OpenCLIP's config of a model, overrides applied.

    Args:
        model: a name, a `local-dir:` or `hf-hub:` reference, or a .json model config.
        attention: in place of the model's own.

    Raises:
        ValueError: no such model; the message lists near matches.
    """
    config = _read_model_config(model)
    if attention is not None:
        config["attention"] = AttentionSpec.from_config(attention).to_config()
    if force_image_size is not None:
        size = force_image_size if isinstance(force_image_size, int) else list(force_image_size)
        config["vision_cfg"]["image_size"] = size[0] if isinstance(size, list) and len(size) == 1 else size
    if force_context_length is not None:
        config["text_cfg"]["context_length"] = force_context_length
    if force_patch_dropout is not None:
        config["vision_cfg"]["patch_dropout"] = force_patch_dropout
    if force_quick_gelu:
        config["quick_gelu"] = True
    if force_custom_text:
        config["custom_text"] = True
    return config


def _read_model_config(model: str) -> ModelConfig:
    if model.endswith(".json"):
        return _read_model_config_file(Path(model))
    config: ModelConfig | None = open_clip.get_model_config(
        model.replace("/", "-") if ":" not in model else model
    )
    if config is None:
        raise ValueError(f"no model named {model!r}; {_near_models(model)} (or give a .json model config)")
    return config


def _read_model_config_file(path: Path) -> ModelConfig:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"no model config at {path}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    config = config.get("model_cfg", config)
    missing = {"embed_dim", "vision_cfg", "text_cfg"} - set(config)
    if missing:
        raise ValueError(f"{path} is not an OpenCLIP model config: it lacks {', '.join(sorted(missing))}")
    return dict(config)


def _near_models(name: str) -> str:
    near = difflib.get_close_matches(name, open_clip.list_models(), n=5, cutoff=0.5)
    return (
        f"did you mean {', '.join(near)}?" if near else f"this package adds {', '.join(list_linear_models())}"
    )


def build(
    model_config: ModelConfig,
    *,
    model_name: str,
    precision: str = "fp32",
    device: str | torch.device = "cpu",
    preprocess_config: Mapping[str, Any] | None = None,
    aug_cfg: Mapping[str, Any] | None = None,
) -> ClipBundle:
    """A randomly initialised model of a resolved config, with its transforms and tokenizer.

    Args:
        model_config: from `resolve_model_config` or a checkpoint.
        model_name: for people; not looked up.
        precision: one of OpenCLIP's precision names.
        preprocess_config: overrides of OpenCLIP's image mean, std, interpolation, resize_mode.
        aug_cfg: OpenCLIP's training augmentation options.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; expected one of {', '.join(PRECISIONS)}")
    with tempfile.TemporaryDirectory() as folder, _without_random_init_warning():
        # A local folder is OpenCLIP's public way to build a model from a config that has no name.
        hub_config = {"model_cfg": model_config, "preprocess_cfg": dict(preprocess_config or {})}
        (Path(folder) / "open_clip_config.json").write_text(json.dumps(hub_config), encoding="utf-8")
        reference = f"local-dir:{folder}"
        model, preprocess_train, preprocess_val = open_clip.create_model_and_transforms(
            reference, precision=precision, device=device, output_dict=True, aug_cfg=dict(aug_cfg or {})
        )
        tokenizer = open_clip.get_tokenizer(reference)
        bound_tokenizer_cache(tokenizer)
    return ClipBundle(
        model=model,
        preprocess_train=preprocess_train,
        preprocess_val=preprocess_val,
        tokenizer=tokenizer,
        model_name=model_name,
        model_config=model_config,
        preprocess_config=dict(model.visual.preprocess_cfg),
        precision=precision,
        device=torch.device(device),
    )


@contextmanager
def _without_random_init_warning() -> Iterator[None]:
    """OpenCLIP warns of random weights on every build; here they are intended or loaded right after."""
    logger = logging.getLogger()
    noise = ("No pretrained weights loaded", "Local config loaded, but no CLIP weights")

    def keep(record: logging.LogRecord) -> bool:
        """Whether a log record is more than noise."""
        return not record.getMessage().startswith(noise)

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load any checkpoint that OpenCLIP reads, strictly; position embeddings are resized to fit.

    Raises:
        WeightsError: weights of another attention or another model, or nothing readable at `path`.
    """
    try:
        open_clip.load_checkpoint(model, str(path), strict=True)
    except WeightsError:
        raise
    except Exception as error:  # whatever unpickling and tensor copies lead to
        raise WeightsError(f"the weights in {path} can't be loaded: {error}") from error
