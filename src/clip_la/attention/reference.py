"""The three attentions as their equations are written, with N x M weights: the truth in tests, slow.

Layout and names: q (B, H, N, D), k (B, H, M, D), v (B, H, M, E), out (B, H, N, E); `key_padding_mask`
(B, M), True where a key is to be ignored. Everything is computed in the dtype of the inputs (use float64
for a truth), and gradients come from autograd.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NORM_FLOOR = 1e-12
"""Rows are normalised as x / max(|x|, NORM_FLOOR), as `torch.nn.functional.normalize` does."""

EQ4_FLOOR = 1e-3
"""Eq. 4's denominator is kept at least this far from 0, with its sign (0 counts as positive).

With normalised q and k it is a sum of weights in [0, 2] and reaches 0 where every visible k points against
q: in the first causal row as soon as k_1 = -q_1. With raw q and k it has any sign. Where the floor acts,
the denominator is a constant: no gradient flows through it."""


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_padding_mask: Tensor | None = None
) -> Tensor:
    """o_i = sum_n softmax_n(q_i.k_n / sqrt(D)) v_n; a row that sees no key is 0."""
    visible = _visible_keys(q, k, causal, key_padding_mask)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
    return weights.masked_fill(~visible, 0.0) @ v


def eq4_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    normalise_qk: bool = True,
) -> Tensor:
    """o_i = sum_n (1 + q_i.k_n) v_n / sum_n (1 + q_i.k_n), with q and k normalised or raw."""
    if normalise_qk:
        q, k = _normalise(q), _normalise(k)
    visible = _visible_keys(q, k, causal, key_padding_mask)
    weights = (1 + q @ k.mT).masked_fill(~visible, 0.0)
    denominator = weights.sum(dim=-1, keepdim=True)
    floor = torch.where(denominator < 0, -EQ4_FLOOR, EQ4_FLOOR).to(denominator.dtype)
    return weights @ v / torch.where(denominator.abs() < EQ4_FLOOR, floor, denominator)


def eq7_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: str | float | None = None,
    gain: float | Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    centre_values: bool = False,
) -> Tensor:
    """o_i = scale * sum_n (1 + gain_h q^_i.k^_n) v_n, or with v_n less the mean of v over the visible keys.

    scale: None for the paper's 1/2, "length" for 1/M (all tokens of the call, padded ones too), or a number.
    gain: None for the paper's 1, a number, or one number a head, (H,).
    """
    if scale is None:
        scale = 0.5
    elif scale == "length":
        scale = 1.0 / max(k.shape[-2], 1)
    if isinstance(gain, Tensor):
        gain = gain.to(q.dtype)[:, None, None]
    visible = _visible_keys(q, k, causal, key_padding_mask)
    weights = 1 + (1.0 if gain is None else gain) * (_normalise(q) @ _normalise(k).mT)
    if centre_values:
        shares = visible.to(v.dtype) / visible.sum(-1, keepdim=True).clamp(min=1)
        v = v - shares[..., :1, :] @ v
    return float(scale) * (weights.masked_fill(~visible, 0.0) @ v)


def _normalise(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1, eps=NORM_FLOOR)


def _visible_keys(q: Tensor, k: Tensor, causal: bool, key_padding_mask: Tensor | None) -> Tensor:
    """Which keys a query sums over, as a bool tensor that broadcasts to (B, H, N, M)."""
    visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    if causal:
        visible = visible.tril()
    if key_padding_mask is not None:
        visible = visible & ~key_padding_mask[:, None, None, :]
    return visible
