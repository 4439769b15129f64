"""The operator in plain operations computes what the operator does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from clip_la.attention import AttentionSpec, LinearAttention
from clip_la.attention.plain import DECOMPOSITIONS, plain_linear_attention

CASES: dict[str, dict[str, Any]] = {
    "eq7": {"kind": "eq7", "factor": 0.5},
    "eq7-length": {"kind": "eq7", "factor": None},
    "eq7-gain": {"kind": "eq7", "factor": None, "gain": True},
    "eq4": {"kind": "eq4", "factor": 0.5},
    "eq4-raw": {"kind": "eq4", "factor": 0.5, "normalise": False},
    "eq7-centred": {"kind": "eq7", "factor": None, "gain": True, "centre_values": True},
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_same_as_the_operator(case: str, causal: bool) -> None:
    torch.manual_seed(0)
    options = {"gain": False, "normalise": True, "centre_values": False, **CASES[case]}
    if options["centre_values"] and causal:
        pytest.skip("values are centred where attention isn't causal")
    gain = torch.tensor([3.0, -1.5]) if options["gain"] else None
    args = (gain, None, options["kind"], causal, options["factor"], options["normalise"])
    args = (*args, options["centre_values"], "torch")
    for num_tokens in (1, 7, 150):
        q, k, v = torch.randn(3, 2, 2, num_tokens, 16, dtype=torch.float64)
        packed = torch.randn(2, num_tokens, 3, 2, 16, dtype=torch.float64)
        for qkv in ([q, k, v], [packed]):
            expected = torch.ops.clip_la.linear_attention(qkv, *args)[0]
            found = plain_linear_attention(qkv, *args).out
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_cross_attention_and_counts_of_keys() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 2, 5, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 16)
    num_keys = torch.full((2, 1, 5, 1), 7.0)
    args = (None, num_keys, "eq4", False, 0.5, True, False, "torch")
    expected = torch.ops.clip_la.linear_attention([q, k, v], *args)[0]
    torch.testing.assert_close(plain_linear_attention([q, k, v], *args).out, expected, rtol=1e-5, atol=1e-5)


def test_the_floor_of_eq4_keeps_its_sign() -> None:
    k = torch.nn.functional.normalize(torch.randn(1, 1, 1, 8), dim=-1)
    args = (None, None, "eq4", False, 0.5, True, False, "torch")
    for sign in (-1.0, -0.9999):
        qkv = [sign * k, k, torch.ones(1, 1, 1, 8)]
        expected = torch.ops.clip_la.linear_attention(qkv, *args)[0]
        torch.testing.assert_close(plain_linear_attention(qkv, *args).out, expected, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("spec", [{"kind": "eq7"}, {"kind": "eq4"}, {"kind": "eq7", "centre_values": True}])
@pytest.mark.parametrize("causal", [False, True])
def test_an_exported_module_decomposes_into_plain_operations(spec: dict[str, Any], causal: bool) -> None:
    module = LinearAttention(32, 2, spec=AttentionSpec.from_config(spec), causal=causal).eval()

    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x)[0]

    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(SelfAttention(), (torch.randn(2, 9, 32),), dynamic_shapes=shapes)
    assert any("clip_la" in str(node.target) for node in program.graph.nodes)
    plain = program.run_decompositions(dict(DECOMPOSITIONS))
    assert not any("clip_la" in str(node.target) for node in plain.graph.nodes)
    x = torch.randn(5, 9, 32)
    torch.testing.assert_close(plain.module()(x), module(x, x, x)[0], rtol=1e-5, atol=1e-5)
