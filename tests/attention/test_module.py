"""LinearAttention as a stand-in for nn.MultiheadAttention."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clip_la.attention.module import LinearAttention
from clip_la.attention.reference import eq4_attention, eq7_attention
from clip_la.attention.spec import AttentionSpec

SPECS = {
    "eq7": AttentionSpec("eq7"),
    "eq7-gain": AttentionSpec("eq7", scale="length", gain="learned"),
    "eq7-fixed": AttentionSpec("eq7", scale=1 / 197, gain=4.0, output_norm="rms"),
    "eq7-centred": AttentionSpec("eq7", scale="length", gain="learned", centre_values=True),
    "eq4": AttentionSpec("eq4"),
    "eq4-raw": AttentionSpec("eq4", normalise_qk=False, output_norm="rms"),
}


def build(spec: AttentionSpec, causal: bool = False, **options: Any) -> LinearAttention:
    torch.manual_seed(0)
    return LinearAttention(32, 4, spec=spec, causal=causal, **options)


def by_the_equations(module: LinearAttention, x: Tensor, padding: Tensor | None) -> Tensor:
    """The module's output from its parameters and the reference, in float64."""
    weights = {name: parameter.detach().double() for name, parameter in module.named_parameters()}
    packed = x.double() @ weights["in_proj_weight"].T + weights["in_proj_bias"]
    q, k, v = packed.unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    spec = module.spec
    if spec.kind == "eq4":
        out = eq4_attention(
            q, k, v, causal=module.causal, key_padding_mask=padding, normalise_qk=spec.normalise_qk
        )
    else:
        gain = weights.get("gain", None if spec.gain == "none" else spec.gain)
        scale = None if spec.scale == "none" else spec.scale
        centre = spec.centre_values and not module.causal
        out = eq7_attention(
            q,
            k,
            v,
            causal=module.causal,
            scale=scale,
            gain=gain,
            key_padding_mask=padding,
            centre_values=centre,
        )
    if spec.output_norm == "rms":
        out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return out.transpose(1, 2).flatten(2) @ weights["out_proj.weight"].T + weights["out_proj.bias"]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_matches_the_equations(spec: AttentionSpec, causal: bool, padded: bool) -> None:
    module, x = build(spec, causal), torch.randn(2, 9, 32)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 6:] = True
    out, weights = module(x, x, x, key_padding_mask=padding if padded else None)
    assert weights is None
    torch.testing.assert_close(
        out.double(), by_the_equations(module, x, padding if padded else None), **CLOSE
    )


CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize("bias", [False, True])
def test_packed_projection_equals_separate_ones(bias: bool) -> None:
    module, x = build(SPECS["eq7"], bias=bias), torch.randn(2, 9, 32)
    packed, separate = module(x, x, x)[0], module(x, x.clone(), x.clone())[0]
    torch.testing.assert_close(packed, separate)


def test_cross_attention() -> None:
    module, x, y = build(SPECS["eq4"]), torch.randn(2, 9, 32), torch.randn(2, 5, 32)
    assert module(x, y, y)[0].shape == (2, 9, 32)


def test_parameters_are_those_of_softmax_attention() -> None:
    torch.manual_seed(0)
    softmax = nn.MultiheadAttention(32, 4, batch_first=True)
    linear = build(SPECS["eq7"])
    assert list(linear.state_dict()) == list(softmax.state_dict())
    for name, parameter in softmax.named_parameters():
        assert torch.equal(parameter, linear.get_parameter(name))
    gained = build(SPECS["eq7-gain"])
    assert set(gained.state_dict()) - set(softmax.state_dict()) == {"gain"}
    assert torch.equal(gained.get_parameter("gain"), torch.full((4,), math.sqrt(8)))


def test_from_softmax_adopts_without_drawing_random_numbers() -> None:
    softmax = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    softmax.in_proj_weight.requires_grad_(False)
    before = torch.get_rng_state()
    linear = LinearAttention.from_softmax(softmax, SPECS["eq7-gain"], causal=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert dict(linear.named_parameters(), gain=None) == dict(softmax.named_parameters(), gain=None)
    assert all(linear.get_parameter(name) is p for name, p in softmax.named_parameters())
    assert not linear.training
    assert all(p.device.type == "cpu" for p in linear.parameters())
    assert linear(*[torch.randn(1, 3, 32)] * 3)[0].shape == (1, 3, 32)


def test_from_softmax_without_bias() -> None:
    softmax = nn.MultiheadAttention(32, 4, bias=False, batch_first=True)
    linear = LinearAttention.from_softmax(softmax, SPECS["eq7"], causal=False)
    assert list(linear.state_dict()) == list(softmax.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"kdim": 16}, "kdim 16"),
        ({"vdim": 16}, "vdim 16"),
        ({"add_bias_kv": True}, "bias_k"),
        ({"add_zero_attn": True}, "add_zero_attn"),
        ({"batch_first": False}, "batch_first=False"),
    ],
)
def test_softmax_attention_that_is_refused(options: dict[str, Any], message: str) -> None:
    softmax = nn.MultiheadAttention(32, 4, **{"batch_first": True} | options)
    with pytest.raises(ValueError, match=message):
        LinearAttention.from_softmax(softmax, SPECS["eq7"], causal=False)


def test_softmax_spec_is_refused() -> None:
    with pytest.raises(ValueError, match="softmax"):
        build(AttentionSpec("softmax"))


def causal_mask(n: int) -> Tensor:
    return torch.full((n, n), -math.inf).triu(1)


def test_causal_with_its_mask_without_and_with_the_hint() -> None:
    module, x = build(SPECS["eq7"], causal=True), torch.randn(2, 9, 32)
    expected = module(x, x, x)[0]
    for mask in (causal_mask(9), causal_mask(9).bfloat16(), causal_mask(9).isinf()):
        assert torch.equal(module(x, x, x, attn_mask=mask)[0], expected)
        assert torch.equal(module(x, x, x, attn_mask=mask, is_causal=True)[0], expected)
    x[:, 5:] = 0.0
    torch.testing.assert_close(module(x, x, x)[0][:, :5], expected[:, :5])


@pytest.mark.parametrize(
    ("causal", "call", "message"),
    [
        (False, {"attn_mask": causal_mask(9)}, "built with causal=False"),
        (False, {"is_causal": True}, "built with causal=False"),
        (True, {"attn_mask": torch.zeros(9, 9)}, "is not the causal mask"),
        (True, {"attn_mask": torch.ones(9, 9, dtype=torch.bool).tril()}, "is not the causal mask"),
        (True, {"attn_mask": causal_mask(8)}, r"shape \(8, 8\)"),
        (True, {"attn_mask": causal_mask(9).expand(8, 9, 9)}, r"shape \(8, 9, 9\)"),
        (False, {"need_weights": True}, "no attention weights"),
        (False, {"key_padding_mask": torch.zeros(2, 9)}, "expected bool"),
    ],
)
def test_calls_that_are_refused(causal: bool, call: dict[str, Any], message: str) -> None:
    x = torch.randn(2, 9, 32)
    with pytest.raises(ValueError, match=message):
        build(SPECS["eq7"], causal)(x, x, x, **call)


def test_unbatched_inputs_are_refused() -> None:
    x = torch.randn(9, 32)
    with pytest.raises(ValueError, match="unsqueeze"):
        build(SPECS["eq7"])(x, x, x)


def test_transformer_layer_does_not_turn_to_softmax_at_inference() -> None:
    """nn.TransformerEncoderLayer has a fused inference path that reads the weights of its attention."""
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=True, dropout=0.0)
    layer.self_attn = LinearAttention.from_softmax(layer.self_attn, SPECS["eq7"], causal=False)
    x = torch.randn(2, 9, 32)
    expected = layer(x)
    with torch.inference_mode():
        torch.testing.assert_close(layer.eval()(x), expected)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_training_step_in_bfloat16(spec: AttentionSpec) -> None:
    for causal in (False, True):
        module = build(spec, causal)
        x = torch.zeros(2, 70, 32)  # opposite rows: Eq. 4's denominator is at its floor
        x[:, ::2], x[:, 1::2] = 1.0, -1.0
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x, x, x)[0]
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
        assert module.bfloat16()(*[x.bfloat16()] * 3)[0].isfinite().all()


def test_checkpointing_copying_and_pickling() -> None:
    module, x = build(SPECS["eq7-gain"], causal=True), torch.randn(2, 9, 32, requires_grad=True)
    expected = module(x, x, x, attn_mask=causal_mask(9))[0]
    recomputed = torch.utils.checkpoint.checkpoint(module, x, x, x, use_reentrant=False)[0]
    assert torch.equal(recomputed, expected)
    gradients = [torch.autograd.grad(out.sum(), x)[0] for out in (expected, recomputed)]
    assert torch.equal(*gradients)
    pickled = io.BytesIO()
    torch.save(module, pickled)
    pickled.seek(0)
    for copied in (copy.deepcopy(module), torch.load(pickled, weights_only=False)):
        assert torch.equal(copied(x, x, x)[0], expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["eq7-gain", "eq4"])
def test_compiles_in_one_graph_of_any_length(name: str, causal: bool) -> None:
    """aot_eager: what is traced, forward and backward, without the time that code generation takes."""
    module = build(SPECS[name], causal)
    torch._dynamo.reset()
    graphs = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (9, 140, 300):
        x = torch.randn(2, length, 32, requires_grad=True)
        mask = causal_mask(length) if causal else None
        expected = module(x, x, x, attn_mask=mask)[0]
        with torch._dynamo.config.patch(error_on_recompile=True):
            found = graphs(x, x, x, attn_mask=mask)[0]
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), x) for out in (found, expected)))


@pytest.mark.parametrize("causal", [False, True])
def test_exports_with_a_dynamic_length(causal: bool) -> None:
    module, x = build(SPECS["eq7-gain"], causal).eval(), torch.randn(2, 9, 32)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(module, (x, x, x), dynamic_shapes=[{1: tokens}] * 3)
    y = torch.randn(2, 200, 32)
    torch.testing.assert_close(program.module()(y, y, y)[0], module(y, y, y)[0])
