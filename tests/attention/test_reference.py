"""The reference against loops written from the equations, and at the edges that the equations leave open."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from accuracy import random_qkv
from torch import Tensor

from clip_la.attention.reference import EQ4_FLOOR, eq4_attention, eq7_attention, softmax_attention


def _loop(q: Tensor, k: Tensor, v: Tensor, causal: bool, weight: str, head: int) -> Tensor:
    """One head (N, D) of the equations, a query and a key at a time."""
    rows = []
    for i in range(len(q)):
        keys = range(i + 1 if causal else len(k))
        cosines = [float(q[i] @ k[n] / (q[i].norm() * k[n].norm())) for n in keys]
        if weight == "softmax":
            exps = [math.exp(float(q[i] @ k[n]) / math.sqrt(q.shape[1])) for n in keys]
            weights = [e / sum(exps) for e in exps]
        elif weight == "eq4":
            weights = [(1 + c) / sum(1 + c for c in cosines) for c in cosines]
        else:
            weights = [0.25 * (1 + (head + 2) * c) for c in cosines]
        rows.append(sum((w * v[n] for w, n in zip(weights, keys, strict=True)), torch.zeros_like(v[0])))
    return torch.stack(rows)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("weight", ["softmax", "eq4", "eq7"])
def test_matches_the_equation(weight: str, causal: bool) -> None:
    q, k, v = random_qkv(1, 2, 5, 4, torch.float64)
    if weight == "softmax":
        out = softmax_attention(q, k, v, causal=causal)
    elif weight == "eq4":
        out = eq4_attention(q, k, v, causal=causal)
    else:
        gain = torch.tensor([2.0, 3.0], dtype=torch.float64)
        out = eq7_attention(q, k, v, causal=causal, scale=0.25, gain=gain)
    for head in range(2):
        expected = _loop(q[0, head], k[0, head], v[0, head], causal, weight, head)
        torch.testing.assert_close(out[0, head], expected, rtol=1e-12, atol=1e-12)


def test_softmax_is_torchs() -> None:
    q, k, v = random_qkv(2, 2, 7, 8, torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(softmax_attention(q, k, v, causal=True), expected)


@pytest.mark.parametrize("attention", [softmax_attention, eq4_attention, eq7_attention])
def test_padded_keys_do_not_matter(attention: Callable[..., Tensor]) -> None:
    q, k, v = random_qkv(2, 2, 6, 4, torch.float64)
    padding = torch.tensor([[False] * 4 + [True] * 2, [True] * 6])
    out = attention(q, k, v, key_padding_mask=padding)
    options = {"scale": 0.5} if attention is eq7_attention else {}
    torch.testing.assert_close(out[0], attention(q[:1], k[:1, :, :4], v[:1, :, :4], **options)[0])
    assert (out[1] == 0).all()


def test_scale_length_counts_padded_keys() -> None:
    q, k, v = random_qkv(1, 1, 6, 4, torch.float64)
    padding = torch.tensor([[False] * 4 + [True] * 2])
    by_length = eq7_attention(q, k, v, scale="length", key_padding_mask=padding)
    torch.testing.assert_close(by_length, eq7_attention(q, k, v, scale=1 / 6, key_padding_mask=padding))


def test_eq4_floor_keeps_opposite_rows_finite() -> None:
    q, _, v = random_qkv(1, 1, 1, 4, torch.float64)
    k = (-q).requires_grad_()
    out = eq4_attention(q, k, v)
    out.sum().backward()
    assert out.abs().max() <= v.abs().max() * 1e-12 / EQ4_FLOOR
    assert k.grad is not None
    assert k.grad.isfinite().all()
