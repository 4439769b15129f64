"""What is measured of a layer: against values worked out by hand, and at the two ends of the scale."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clip_la.attention.diagnostics import MAX_QUERIES, measure_weights
from clip_la.attention.module import LinearAttention
from clip_la.attention.spec import AttentionSpec

KINDS: list[dict[str, Any]] = [
    {"kind": "softmax"},
    {"kind": "eq4"},
    {"kind": "eq7"},
    {"kind": "eq7", "gain": "learned", "scale": "length"},
    {"kind": "eq7", "gain": 3.0, "output_norm": "rms"},
]
by_kind = pytest.mark.parametrize("config", KINDS, ids=lambda config: "-".join(map(str, config.values())))


def layer(config: dict[str, Any], embed_dim: int = 8, num_heads: int = 2, causal: bool = False) -> Any:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)
    spec = AttentionSpec.from_config(config)
    return (
        attention if spec.kind == "softmax" else LinearAttention.from_softmax(attention, spec, causal=causal)
    )


def set_projection(attention: nn.MultiheadAttention, *factors: float) -> None:
    """q, k and v are the tokens times these factors."""
    width = attention.embed_dim
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.cat([factor * torch.eye(width) for factor in factors]))
        attention.in_proj_bias.zero_()


def two_tokens() -> Tensor:
    return torch.eye(2)[None]


@pytest.mark.parametrize(
    ("config", "weights", "query_to_constant"),
    [
        # Rows (1, 1)/2 plus the identity's half; o - z/2 is half a unit vector, |z/2| = sqrt(2)/2.
        ({"kind": "eq7"}, [[1.0, 0.5], [0.5, 1.0]], 1 / math.sqrt(2)),
        ({"kind": "eq7", "gain": -1.0}, [[0.0, 0.5], [0.5, 0.0]], 1 / math.sqrt(2)),
        ({"kind": "eq7", "gain": 3.0, "scale": 0.1}, [[0.4, 0.1], [0.1, 0.4]], 3 / math.sqrt(2)),
        # 0.3 on the diagonal, less each row's mean; nothing is left of the constant part.
        (
            {"kind": "eq7", "gain": 3.0, "scale": 0.1, "centre_values": True},
            [[0.15, -0.15], [-0.15, 0.15]],
            math.nan,
        ),
        # (2, 1) / 3; the mean is (1, 1) / 2 and o less it (1, -1) / 6.
        ({"kind": "eq4"}, [[2 / 3, 1 / 3], [1 / 3, 2 / 3]], 1 / 3),
    ],
)
def test_two_tokens_by_hand(
    config: dict[str, Any], weights: list[list[float]], query_to_constant: float
) -> None:
    attention = layer(config, embed_dim=2, num_heads=1)
    set_projection(attention, 5.0, 2.0, 1.0)
    found = measure_weights(attention, two_tokens(), causal=False)
    row = torch.tensor(weights[0])
    row = row / row.abs().sum()
    entropy = -sum(p * math.log(p) for p in row.abs().tolist() if p > 0) / math.log(2)
    # A symmetric [[a, b], [b, a]] has the singular values |a + b| and |a - b|.
    sigma = torch.stack([row.sum().abs(), (row[0] - row[1]).abs()])
    sigma = sigma / sigma.sum()
    rank = math.exp(-sum(s * math.log(s) for s in sigma.tolist() if s > 0))
    assert found == pytest.approx(
        {"query_to_constant": query_to_constant, "entropy": entropy, "effective_rank": rank},
        abs=1e-5,
        nan_ok=True,
    )


def test_softmax_by_hand() -> None:
    attention = layer({"kind": "softmax"}, embed_dim=2, num_heads=1)
    set_projection(attention, math.sqrt(2) * math.log(3), 1.0, 1.0)  # scores log 3 and 0
    found = measure_weights(attention, two_tokens(), causal=False)
    assert found["entropy"] == pytest.approx((math.log(4) - 0.75 * math.log(3)) / math.log(2), abs=1e-6)
    assert found["query_to_constant"] == pytest.approx(0.5, abs=1e-6)  # (1, -1)/4 to (1, 1)/2


@by_kind
def test_queries_that_say_nothing_attend_uniformly(config: dict[str, Any]) -> None:
    attention = layer(config)
    set_projection(attention, 0.0, 1.0, 1.0)
    found = measure_weights(attention, torch.randn(3, 10, 8), causal=False)
    assert found["entropy"] == pytest.approx(1, abs=1e-5)
    assert found["effective_rank"] == pytest.approx(1, abs=1e-3)
    assert found["query_to_constant"] == pytest.approx(0, abs=1e-6)


@by_kind
@pytest.mark.parametrize("causal", [False, True])
def test_the_output_is_the_one_that_is_measured(config: dict[str, Any], causal: bool) -> None:
    """The constant part plus the rest is what the layer itself gives: |o - c| / |c| from its own calls."""
    attention = layer({**config, "output_norm": "none"}, causal=causal)
    x = torch.randn(2, 6, 8)
    mask = torch.full((6, 6), -math.inf).triu(1) if causal and config["kind"] == "softmax" else None
    with torch.no_grad():
        attention.out_proj.weight.copy_(torch.eye(8))
        out, _ = attention(x, x, x, need_weights=False, attn_mask=mask)
        found = measure_weights(attention, x, causal=causal)
        attention.in_proj_weight[:8] = 0
        attention.in_proj_bias[:8] = 0
        constant, _ = attention(x, x, x, need_weights=False, attn_mask=mask)
    ratio = ((out - constant).norm() / constant.norm()).item()
    assert found["query_to_constant"] == pytest.approx(ratio, rel=1e-4)


@by_kind
def test_a_causal_row_is_measured_by_what_it_sees(config: dict[str, Any]) -> None:
    attention = layer(config, causal=True)
    set_projection(attention, 0.0, 1.0, 1.0)
    found = measure_weights(attention, torch.randn(2, 7, 8), causal=True)
    assert found["entropy"] == pytest.approx(1, abs=1e-5)
    assert found["effective_rank"] > 2


def test_sharp_attention_is_at_the_other_end() -> None:
    attention = layer({"kind": "softmax"}, embed_dim=8, num_heads=1)
    set_projection(attention, 100.0, 1.0, 1.0)
    found = measure_weights(attention, torch.eye(8)[None], causal=False)
    assert found["entropy"] == pytest.approx(0, abs=1e-5)
    assert found["effective_rank"] == pytest.approx(8, abs=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_long_sequences_are_sampled(causal: bool) -> None:
    attention = layer({"kind": "eq7"}, causal=causal)
    found = measure_weights(attention, torch.randn(1, MAX_QUERIES + 44, 8), causal=causal)
    assert 0.9 < found["entropy"] < 1
    assert 1 < found["effective_rank"] < MAX_QUERIES


def test_what_is_not_finite_is_nan() -> None:
    found = measure_weights(layer({"kind": "eq7"}), torch.full((1, 4, 8), math.nan), causal=False)
    assert all(math.isnan(value) for value in found.values())
