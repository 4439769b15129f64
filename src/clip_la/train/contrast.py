"""The contrastive loss and its gradient, over one micro-batch or several that count as one batch.

With several, features are computed first without a graph, the loss once on all of them, and its
gradient with respect to the features is then carried through each micro-batch (GradCache, arXiv
2101.06983). So every parameter, `logit_scale` too, gets the gradient of the big batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import open_clip
import torch
from open_clip.loss import SigLipLoss
from torch import Tensor, nn

from clip_la.bundle import ClipBundle
from clip_la.config import RunConfig
from clip_la.distributed import World

FEATURES = ("image_features", "text_features")


@dataclass(frozen=True)
class Micro:
    """One micro-batch on the device: images (b, 3, height, width), texts (b, context_length)."""

    images: Tensor
    texts: Tensor


class Contrast:
    """OpenCLIP's CLIP or SigLIP loss with the run's options."""

    def __init__(self, config: RunConfig, world: World, bundle: ClipBundle) -> None:
        self._bundle = bundle
        if config.siglip:
            self._loss: nn.Module = SigLipLoss(
                rank=world.rank, world_size=world.size, dist_impl=config.loss_dist_impl
            )
        else:
            self._loss = open_clip.ClipLoss(
                local_loss=config.local_loss,
                gather_with_grad=config.gather_with_grad,
                cache_labels=True,
                rank=world.rank,
                world_size=world.size,
            )

    def backward(
        self, model: nn.Module, micros: Sequence[Micro], scaler: torch.amp.GradScaler | None
    ) -> Tensor:
        """Add the batch's gradient to the parameters.

        Args:
            model: the model, wrapped or not, that returns OpenCLIP's output dict.
            micros: micro-batches that count as one batch.
            scaler: scales the loss, if there is one.

        Returns:
            The loss, detached and unscaled.
        """
        if len(micros) > 1:
            return self._backward_cached(model, micros, scaler)
        with self._bundle.autocast():
            loss = self._compute(model(micros[0].images, micros[0].texts))
        _scaled(loss, scaler).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _compute(self, outputs: dict[str, Tensor]) -> Tensor:
        loss: Tensor = sum(self._loss(**outputs, output_dict=True).values())
        return loss

    def _backward_cached(
        self, model: nn.Module, micros: Sequence[Micro], scaler: torch.amp.GradScaler | None
    ) -> Tensor:
        rng_states, cached = [], []
        for micro in micros:
            rng_states.append(_rng_state(self._bundle.device))
            with torch.no_grad(), self._bundle.autocast():
                cached.append(model(micro.images, micro.texts))
        leaves = _leaves(cached)
        with self._bundle.autocast():
            loss = self._compute(leaves)
        _scaled(loss, scaler).backward()  # type: ignore[no-untyped-call]
        for index, (micro, rng_state) in enumerate(zip(micros, rng_states, strict=True)):
            is_last = index == len(micros) - 1
            _set_rng_state(rng_state, self._bundle.device)
            with _without_sync(model, active=not is_last):
                with self._bundle.autocast():
                    outputs = model(micro.images, micro.texts)
                gradients = _gradients_of(leaves, outputs, index * len(micro.images), is_last)
                torch.autograd.backward(list(outputs.values()), gradients)
        return loss.detach()


def _leaves(cached: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All micro-batches' features, and the scalars once, as leaves that collect gradients."""
    return {
        name: (torch.cat([outputs[name] for outputs in cached]) if name in FEATURES else value)
        .detach()
        .requires_grad_()
        for name, value in cached[0].items()
    }


def _gradients_of(
    leaves: dict[str, Tensor], outputs: dict[str, Tensor], start: int, is_last: bool
) -> list[Tensor]:
    """The gradient of each output of one micro-batch; the scalars' only once, with the last one."""
    gradients = []
    for name, output in outputs.items():
        gradient = leaves[name].grad
        assert gradient is not None
        if name in FEATURES:
            gradients.append(gradient[start : start + len(output)])
        else:
            gradients.append(gradient if is_last else torch.zeros_like(gradient))
    return gradients


def _scaled(loss: Tensor, scaler: torch.amp.GradScaler | None) -> Tensor:
    return loss if scaler is None else scaler.scale(loss)


def _without_sync(model: Any, *, active: bool) -> AbstractContextManager[Any]:
    """DDP averages gradients once, with the last micro-batch."""
    return model.no_sync() if active and hasattr(model, "no_sync") else nullcontext()


def _rng_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_rng_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
