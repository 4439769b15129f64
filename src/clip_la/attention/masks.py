"""Recognising the causal mask that a caller hands to a module which is causal by construction."""

from __future__ import annotations

import math
from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_RECOGNISED: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
"""Masks found causal, with the version they had: a tensor is read again only after it was written to."""


def require_causal(mask: Tensor, num_tokens: int) -> None:
    """Accept the causal mask, additive (0 and -inf) or bool (True: hidden), and nothing else.

    Its values are read once in its life (on a GPU, reading them waits for the device). While a call is traced
    they can't be read: torch.compile and torch.export take any mask of the right shape for the causal one.

    Raises:
        ValueError: another mask.
    """
    if mask.shape != (num_tokens, num_tokens):
        raise ValueError(
            f"attn_mask has shape {tuple(mask.shape)}; linear attention takes the causal mask "
            f"{(num_tokens, num_tokens)} or none, and padding as key_padding_mask"
        )
    if torch.compiler.is_compiling() or mask.is_meta:
        return
    version = None if mask.is_inference() else mask._version
    if version is not None and _RECOGNISED.get(mask) == version:
        return
    if not _is_causal(mask):
        raise ValueError(
            "this is not the causal mask (-inf above the diagonal and 0 elsewhere, or bool, True above ); "
            "linear attention takes no other, and padding as key_padding_mask"
        )
    if version is not None:
        _RECOGNISED[mask] = version


def _is_causal(mask: Tensor) -> bool:
    hidden = torch.ones_like(mask, dtype=torch.bool).triu_(1)
    if mask.dtype == torch.bool:
        return torch.equal(mask, hidden)
    return torch.equal(mask, torch.zeros_like(mask).masked_fill_(hidden, -math.inf))
