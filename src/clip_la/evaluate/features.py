"""Features of class names and texts, in bounded memory, from a model in evaluation mode."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm

from clip_la.bundle import ClipBundle
from clip_la.evaluate.cache import EvaluationCache
from clip_la.evaluate.ranks import (
    failing_together,
    from_rank_0,
    gather_over_ranks,
    interleave,
    rank_and_world_size,
    share,
)
from clip_la.evaluate.templates import Templates

_T = TypeVar("_T")


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """`model.eval()` inside, the mode of before afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def progress(items: Iterable[_T], what: str, total: int | None = None) -> Iterable[_T]:
    """A progress bar on rank 0; where it goes to a file, one line in 30 seconds and none for short work."""
    is_terminal = sys.stderr.isatty()
    return tqdm(
        items,
        desc=what,
        total=total,
        disable=rank_and_world_size()[0] > 0,
        mininterval=0.2 if is_terminal else 30.0,
        delay=0.0 if is_terminal else 10.0,
        leave=not is_terminal,
        dynamic_ncols=is_terminal,
    )


def class_features(
    bundle: ClipBundle, names: Sequence[str], templates: Templates, cache: EvaluationCache, key: str
) -> Tensor:
    """`encode_class_names`, from the cache if they are there, else kept there. Called by all ranks together.

    Args:
        key: `hash_of_text` of the other arguments.
    """
    is_first = rank_and_world_size()[0] == 0
    cached = from_rank_0(cache.load_text(key) if is_first else None)
    if cached is not None:
        return cached.to(bundle.device)
    features = encode_class_names(bundle, names, templates)
    if is_first:
        cache.save_text(key, features)
    return features


def encode_class_names(
    bundle: ClipBundle, names: Sequence[str], templates: Templates, num_prompts_at_once: int = 256
) -> Tensor:
    """One feature a name, float32 (names, embed_dim): the normalised mean over its prompts' features.

    All ranks together: each encodes its share, and gets all. No more than one share of the prompts, and one
    feature a name, is held at a time.

    Args:
        num_prompts_at_once: prompts an encoder call; a name's prompts are never split, so the least is
            the number of templates.

    Raises:
        ValueError: the features are not finite.
        RanksError: on all ranks, where it happened on one of several.
    """
    num_names = max(1, num_prompts_at_once // len(templates.texts))
    starts = range(0, len(names), num_names)
    with failing_together(), evaluation_mode(bundle.model):
        parts = [
            _encode_names(bundle, names[start : start + num_names], templates).cpu()
            for start in progress(share(starts), "class names")
        ]
    return torch.cat(interleave(gather_over_ranks(parts), len(starts))).to(bundle.device)


@torch.inference_mode()
def _encode_names(bundle: ClipBundle, names: Sequence[str], templates: Templates) -> Tensor:
    tokens = bundle.tokenizer([prompt for name in names for prompt in templates.prompts(name)])
    features = refuse_non_finite(bundle.encode_text(tokens), "text")
    means = features.reshape(len(names), len(templates.texts), -1).mean(dim=1)
    return nn.functional.normalize(means, dim=-1)


def refuse_non_finite(features: Tensor, what: str) -> Tensor:
    """The features as given.

    Raises:
        ValueError: some are NaN or infinite; no score of such a model means anything.
    """
    num_bad = int((~features.isfinite().all(dim=-1)).sum())
    if num_bad:
        raise ValueError(
            f"{num_bad} of {len(features)} {what} features are not finite; "
            "the model's weights are broken, or its precision overflows"
        )
    return features
