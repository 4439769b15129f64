"""Why a run trains or doesn't: each attention layer in numbers, on the same few pairs all run long.

Nothing here draws a random number, leaves a hook behind or touches a gradient, so a run with diagnostics
equals one without to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from clip_la.attention.diagnostics import measure_weights
from clip_la.bundle import ClipBundle
from clip_la.config import ConfigError, RunConfig
from clip_la.evaluate.features import evaluation_mode
from clip_la.evaluate.pairs import HeldOutPairs
from clip_la.openclip import AttentionLayer, attention_layers, tower_of
from clip_la.train.specs import train_spec

logger = logging.getLogger(__name__)

NUM_PAIRS = 8
Figures = dict[str, list[float]]


class Diagnostics:
    """Measures every attention layer of a model on the first `NUM_PAIRS` usable training pairs.

    Args:
        config: with `train_data`.
        bundle: the model that is trained, and its transforms.

    Raises:
        ConfigError: no attention layer that can be measured.
        ValueError: the data hold no usable pair.
    """

    def __init__(self, config: RunConfig, bundle: ClipBundle) -> None:
        self._bundle = bundle
        self._layers = list(attention_layers(bundle.model))
        if not self._layers:
            raise ConfigError(
                "--diagnostics found no attention layer to measure; it needs OpenCLIP's native towers with "
                "default blocks"
            )
        self._images, self._tokens = _first_pairs(config, bundle)

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """`TOWER/LAYER/FIGURE` -> value, on the weights as they are, in evaluation mode.

        The figures are those of `measure_weights` and `output_norm`, the mean length of a token's attention
        output, and `output_to_residual`, its size relative to the stream that it is added to.
        """
        bundle, model = self._bundle, self._bundle.model
        figures: Figures = {}
        with evaluation_mode(model), _watched(self._layers, figures), bundle.autocast():
            for image, tokens in zip(self._images, self._tokens, strict=True):  # one: N x N weights are large
                model(image[None].to(bundle.device, bundle.input_dtype), tokens[None].to(bundle.device))
        return {name: fmean(values) for name, values in figures.items()}


def tower_grad_norms(model: nn.Module) -> dict[str, float]:
    """`grad_norm_image` and `grad_norm_text`: the norms of the towers' gradients; 0 of a frozen one."""
    gradients: dict[str, list[Tensor]] = {"image": [], "text": []}
    for name, parameter in model.named_parameters():
        tower = tower_of(name)
        if tower is not None and parameter.grad is not None:
            gradients[tower].append(parameter.grad)
    return {f"grad_norm_{tower}": nn.utils.get_total_norm(found).item() for tower, found in gradients.items()}


def _first_pairs(config: RunConfig, bundle: ClipBundle) -> tuple[Tensor, Tensor]:
    spec = replace(train_spec(config, rank=0, world_size=1), batch_size=NUM_PAIRS, workers=0)
    for batch in HeldOutPairs(spec).load(bundle, rank=0, world_size=1):
        if len(batch.positions):
            return batch.images, batch.tokens
    raise ValueError(f"--diagnostics found no usable pair in {config.train_data}; see `clip-la check`")


@contextmanager
def _watched(layers: list[AttentionLayer], figures: Figures) -> Iterator[None]:
    """Inside, every forward pass adds to `figures`."""
    with ExitStack() as hooks:
        for layer in layers:
            residual: list[Tensor] = []
            hooks.enter_context(layer.block.register_forward_pre_hook(partial(_keep_input, residual)))
            hooks.enter_context(
                layer.attention.register_forward_hook(partial(_measure, figures, layer, residual))
            )
        yield


def _keep_input(residual: list[Tensor], block: nn.Module, args: tuple[Any, ...]) -> None:
    residual[:] = [args[0].float()]


def _measure(
    figures: Figures,
    layer: AttentionLayer,
    residual: list[Tensor],
    attention: nn.MultiheadAttention,
    args: tuple[Any, ...],
    output: tuple[Tensor, Any],
) -> None:
    out = output[0].float()
    with torch.autocast(out.device.type, enabled=False):
        found = {
            "output_norm": out.norm(dim=-1).mean().item(),
            "output_to_residual": (out.norm() / residual.pop().norm()).item(),
            **measure_weights(attention, args[0].float(), causal=layer.causal),
        }
    for name, value in found.items():
        figures.setdefault(f"{layer.name}/{name}", []).append(value)
