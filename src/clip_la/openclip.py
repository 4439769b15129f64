"""The one file that touches OpenCLIP's insides (open_clip_torch 3.3).

Importing it registers the plugin: the model configs of this package become known to OpenCLIP, and the
model classes that OpenCLIP's factory builds accept a top-level `"attention"` entry. Weights of a tower
whose attention is not softmax carry one more buffer, `attention_<kind>`, holding the spec as JSON bytes:
it survives every checkpoint format, makes stock OpenCLIP's strict load refuse such weights, and lets
this plugin name both sides when weights and model disagree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import open_clip
import torch
from open_clip import factory
from open_clip.coca_model import CoCa
from open_clip.model import CLIP, CustomTextCLIP
from open_clip.transformer import ResidualAttentionBlock, TextTransformer, Transformer, VisionTransformer
from torch import Tensor, nn

from clip_la.attention.module import LinearAttention
from clip_la.attention.spec import AttentionSpec
from clip_la.errors import ExpectedError

_MODEL_CONFIG_DIR = Path(__file__).parent / "model_configs"
_TAG_PREFIX = "attention_"
PLUGIN_NEEDED = "requires_import_clip_la"
"""Comes first in the config of an exported model: stock OpenCLIP refuses an unknown key by its name."""


class WeightsError(ExpectedError):
    """Weights that don't belong in the model; the message names what each side is."""


# --- The plugin -------------------------------------------------------------------------------------


class _WithAttention:
    """Mixin before an OpenCLIP model class: takes `attention` and installs it in both towers."""

    def __init__(
        self, *args: Any, attention: Mapping[str, Any] | AttentionSpec | str | None = None, **kwargs: Any
    ) -> None:
        kwargs.pop(PLUGIN_NEEDED, None)  # fulfilled: this is the plugin
        spec = AttentionSpec.from_config(attention)
        if spec.kind != "softmax":
            _refuse_foreign_towers(spec, kwargs)
        super().__init__(*args, **kwargs)
        install_attention(self, spec)
        if spec.kind != "softmax":
            _cast_causal_mask(self, kwargs.get("cast_dtype"))


class AttentionCLIP(_WithAttention, CLIP):  # type: ignore[misc]
    """OpenCLIP's CLIP with a choice of attention."""


class AttentionCustomTextCLIP(_WithAttention, CustomTextCLIP):  # type: ignore[misc]
    """OpenCLIP's CustomTextCLIP (text tower as a module of its own) with a choice of attention."""


class AttentionCoCa(CoCa):  # type: ignore[misc]
    """OpenCLIP's CoCa, which stays softmax: its decoder attends across towers."""

    def __init__(self, *args: Any, attention: Any = None, **kwargs: Any) -> None:
        spec = AttentionSpec.from_config(attention)
        if spec.kind != "softmax":
            raise ValueError(
                f"attention {spec} asked of a CoCa model; only CLIP models of native ViTs have it"
            )
        super().__init__(*args, **kwargs)


def register() -> None:
    """Make OpenCLIP know this package's models and the `attention` entry. Safe to call again."""
    if _MODEL_CONFIG_DIR not in factory._MODEL_CONFIG_PATHS:
        open_clip.add_model_config(_MODEL_CONFIG_DIR)
    factory.CLIP = AttentionCLIP
    factory.CustomTextCLIP = AttentionCustomTextCLIP
    factory.CoCa = AttentionCoCa


def list_linear_models() -> list[str]:
    """The model names that this package adds to OpenCLIP's."""
    return sorted(path.stem for path in _MODEL_CONFIG_DIR.glob("*.json"))


def _refuse_foreign_towers(spec: AttentionSpec, kwargs: Mapping[str, Any]) -> None:
    """Refuse what can't be served before OpenCLIP builds (or downloads) it."""
    reasons = {
        ("vision_cfg", "timm_model_name"): "a timm image tower",
        ("vision_cfg", "attentional_pool"): "an attentional pooler (cross-attention with learned queries)",
        ("text_cfg", "hf_model_name"): "a Hugging Face text tower",
        ("text_cfg", "embed_cls"): "a text class token (its mask is neither causal nor key padding)",
    }
    for (tower, key), what in reasons.items():
        if _entry(kwargs.get(tower), key):
            raise ValueError(
                f"attention {spec} can't replace softmax in {what} ({tower}.{key}); use a native ViT"
            )


def _entry(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


def install_attention(model: CLIP | CustomTextCLIP, spec: AttentionSpec) -> None:
    """Replace the attention of both towers by `spec` in place; parameters are kept, not redrawn.

    Raises:
        ValueError: a tower that is not OpenCLIP's native transformer with default blocks.
    """
    model.attention_spec = spec
    for tower, transformer, causal in _native_transformers(model, spec):
        transformer.attention_spec = spec
        transformer.register_load_state_dict_pre_hook(_refuse_other_attention)
        if spec.kind == "softmax":
            continue
        for block in transformer.resblocks:
            if not isinstance(block, ResidualAttentionBlock) or not isinstance(
                block.attn, nn.MultiheadAttention
            ):
                raise ValueError(
                    f"attention {spec} needs OpenCLIP's default blocks; the {tower} tower has "
                    f"{type(block).__name__} (a block_type, qk_norm or scale_* entry in its config)"
                )
            block.attn = LinearAttention.from_softmax(block.attn, spec, causal=causal)
        transformer.register_buffer(_tag_name(spec), _encode_spec(spec))


class AttentionLayer(NamedTuple):
    """A default block of a native tower and its self-attention; `name` is such as "image/0"."""

    name: str
    block: nn.Module
    attention: nn.MultiheadAttention
    causal: bool


def attention_layers(model: CLIP | CustomTextCLIP) -> Iterator[AttentionLayer]:
    """The layers of both towers that attend by this package's attention or by `nn.MultiheadAttention`."""
    for tower, transformer, causal in _native_transformers(model, model.attention_spec):
        for index, block in enumerate(transformer.resblocks):
            if isinstance(block, ResidualAttentionBlock) and isinstance(block.attn, nn.MultiheadAttention):
                yield AttentionLayer(f"{tower}/{index}", block, block.attn, causal)


def tower_of(parameter: str) -> str | None:
    """The tower of a parameter of a CLIP model, "image" or "text"; None for logit scale and bias."""
    if parameter in ("logit_scale", "logit_bias"):
        return None
    return "image" if parameter.startswith("visual.") else "text"


def _native_transformers(
    model: CLIP | CustomTextCLIP, spec: AttentionSpec
) -> Iterator[tuple[str, Transformer, bool]]:
    """(tower name, its transformer, whether causal) for both towers; softmax skips foreign ones."""
    text = model.text if hasattr(model, "text") else model
    for name, tower, native in (
        ("image", model.visual, VisionTransformer),
        ("text", text, (TextTransformer, CLIP)),
    ):
        if isinstance(tower, native):
            yield name, tower.transformer, name == "text" and tower.attn_mask is not None
        elif spec.kind != "softmax":
            raise ValueError(
                f"attention {spec} needs a native ViT; the {name} tower is {type(tower).__name__}"
            )


def _cast_causal_mask(model: CLIP | CustomTextCLIP, dtype: torch.dtype | None) -> None:
    """Keep the text tower's mask in the precision of the activations (None: float32).

    OpenCLIP's blocks cast it at each call else, and the attention would have to read every copy anew.
    """
    text = model.text if hasattr(model, "text") else model
    if text.attn_mask is not None and dtype is not None:
        text.attn_mask = text.attn_mask.to(dtype)


class _BoundedCache(dict[str, str]):
    """A dict that starts over, but for its first entries, when it has grown too large."""

    def __init__(self, first: Mapping[str, str], max_entries: int) -> None:
        super().__init__(first)
        self._first = dict(first)
        self._max_entries = max_entries

    def __setitem__(self, key: str, value: str) -> None:
        if len(self) >= self._max_entries:
            self.clear()
            self.update(self._first)
        super().__setitem__(key, value)


def bound_tokenizer_cache(tokenizer: Any, max_entries: int = 100_000) -> None:
    """Keep OpenCLIP's SimpleTokenizer from remembering every word of 400 million captions."""
    if isinstance(tokenizer, open_clip.SimpleTokenizer):
        tokenizer.cache = _BoundedCache(tokenizer.cache, max_entries)


# --- Weights know their attention -------------------------------------------------------------------


def _tag_name(spec: AttentionSpec) -> str:
    return _TAG_PREFIX + spec.kind


def _encode_spec(spec: AttentionSpec) -> Tensor:
    return torch.tensor(list(json.dumps(spec.to_config(), sort_keys=True).encode()), dtype=torch.uint8)


def _decode_spec(tag: Tensor) -> AttentionSpec:
    return AttentionSpec.from_config(json.loads(bytes(tag.cpu().tolist())))


def spec_of_weights(state_dict: Mapping[str, Tensor], prefix: str = "") -> AttentionSpec | None:
    """The attention that the transformer weights under `prefix` were trained with; None without weights."""
    has_weights = False
    for key, value in state_dict.items():
        head, _, name = key.rpartition(".")
        if key.startswith(prefix) and name.startswith(_TAG_PREFIX) and head.endswith("transformer"):
            return _decode_spec(value)
        has_weights = has_weights or (key.startswith(prefix) and ".attn." in key)
    return AttentionSpec() if has_weights else None


def _refuse_other_attention(
    transformer: Transformer, state_dict: Mapping[str, Tensor], prefix: str, *_unused: Any
) -> None:
    found = spec_of_weights(state_dict, prefix)
    if found is None or found == transformer.attention_spec or getattr(transformer, "_accept_softmax", False):
        return
    raise WeightsError(
        f"the weights were trained with attention {found}, the model uses {transformer.attention_spec}; "
        "build the model with the weights' attention, or, to start a linear model from softmax weights on "
        "purpose, use clip_la.load_softmax_weights (clip-la train --pretrained-softmax)"
    )


def load_softmax_weights(model: CLIP | CustomTextCLIP, path: str | Path) -> None:
    """Start a model of any attention from softmax weights, on purpose. Gains keep their initial values.

    Raises:
        WeightsError: the weights are not softmax weights, or don't fit the model otherwise.
    """
    found = spec_of_weights(factory.load_state_dict(str(path)))
    if found is None or found.kind != "softmax":
        raise WeightsError(f"{path} holds {found or 'no attention weights'}; expected softmax weights")
    with _accepting_softmax(model):
        keys = open_clip.load_checkpoint(model, str(path), strict=False)
    own = [
        key
        for key in keys.missing_keys
        if key.rpartition(".")[2] not in (_tag_name(model.attention_spec), "gain")
    ]
    if own or keys.unexpected_keys:
        raise WeightsError(f"{path} doesn't fit the model: missing {own}, unexpected {keys.unexpected_keys}")


@contextmanager
def _accepting_softmax(model: CLIP | CustomTextCLIP) -> Iterator[None]:
    transformers = [transformer for _, transformer, _ in _native_transformers(model, model.attention_spec)]
    for transformer in transformers:
        transformer._accept_softmax = True
    try:
        yield
    finally:
        for transformer in transformers:
            del transformer._accept_softmax


register()
