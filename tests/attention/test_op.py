"""linear_attention against the float64 reference, and with torch's tools: opcheck, autocast, compile."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from accuracy import assert_close, output_and_gradients, random_qkv
from torch import Tensor

from clip_la.attention.dispatch import BACKENDS, why_not
from clip_la.attention.op import linear_attention, packed_linear_attention
from clip_la.attention.reference import eq4_attention, eq7_attention

VARIANTS: dict[str, dict[str, Any]] = {
    "eq7": {"kind": "eq7"},
    "eq7-gain": {"kind": "eq7", "scale": "length", "gain": 8.0},
    "eq4": {"kind": "eq4"},
    "eq4-raw": {"kind": "eq4", "normalise_qk": False},
}
LENGTHS = [1, 2, 63, 64, 65, 77, 128, 197, 257, 1025]


def reference(*inputs: Tensor, kind: str, **options: Any) -> Tensor:
    if kind == "eq4":
        return eq4_attention(*inputs, **options)
    q, k, v, *gain = inputs
    return eq7_attention(q, k, v, **options | ({"gain": gain[0]} if gain else {}))


def check(inputs: list[Tensor], dtype: torch.dtype, **options: Any) -> None:
    """Values and gradients of linear_attention(*inputs), by every backend, against the float64 reference."""
    truth = output_and_gradients(partial(reference, **options), [x.double() for x in inputs])
    one_key = options["kind"] == "eq4" and inputs[1].shape[2] == 1  # then dq and dk vanish
    for backend in BACKENDS:
        if why_not(backend, "cpu", dtype) is None:
            found = output_and_gradients(_with_gain_last(options | {"backend": backend}), inputs)
            assert_close(found, truth, dtype, least_size=0.1 if one_key else 1e-12)
            assert [x.dtype for x in found[1:]] == [x.dtype for x in inputs]


def _with_gain_last(options: dict[str, Any]) -> Any:
    def attention(q: Tensor, k: Tensor, v: Tensor, *gain: Tensor) -> Tensor:
        return linear_attention(q, k, v, **options | ({"gain": gain[0]} if gain else {}))

    return attention


def inputs_of(variant: str, B: int, H: int, N: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    q, k, v = random_qkv(B, H, N, D, dtype)
    if variant == "eq4-raw":
        q, k = q * 0.25, k * 0.25
    gain = (
        [torch.linspace(1.0, 8.0, H, dtype=torch.promote_types(dtype, torch.float32))]
        if variant == "eq7-gain"
        else []
    )
    return [q, k, v, *gain]


def options_of(variant: str) -> dict[str, Any]:
    return {name: value for name, value in VARIANTS[variant].items() if name != "gain"}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("N", LENGTHS)
def test_lengths(N: int, dtype: torch.dtype, variant: str, causal: bool) -> None:
    torch.manual_seed(N)
    check(inputs_of(variant, 2, 2, N, 64, dtype), dtype, causal=causal, **options_of(variant))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("D", [32, 80])
def test_head_sizes_and_dtypes(D: int, dtype: torch.dtype, variant: str, causal: bool) -> None:
    torch.manual_seed(D)
    check(inputs_of(variant, 2, 2, 150, D, dtype), dtype, causal=causal, **options_of(variant))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck(variant: str, causal: bool) -> None:
    torch.manual_seed(0)
    inputs = [x.double().requires_grad_() for x in inputs_of(variant, 1, 2, 5, 3, torch.float64)]
    attention = _with_gain_last({"causal": causal, **options_of(variant)})
    assert torch.autograd.gradcheck(attention, inputs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_that_share_a_direction(variant: str, causal: bool) -> None:
    """Then dq and dk of Eq. 4 are small differences of large parts, and z and S are far from random sums."""
    torch.manual_seed(6)
    q, k, v, *gain = inputs_of(variant, 2, 2, 300, 32, torch.bfloat16)
    check([q + 0.5, k + 0.5, v + 1.0, *gain], torch.bfloat16, causal=causal, **options_of(variant))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_cross_attention(variant: str, dtype: torch.dtype) -> None:
    """M keys other than N queries, and rows of v of another size."""
    torch.manual_seed(1)
    q, k, v, *gain = inputs_of(variant, 2, 2, 70, 32, dtype)
    check([q, k[:, :, :66], v[:, :, :66, :16], *gain], dtype, **options_of(variant))


@pytest.mark.parametrize("scale", [None, "length", 1 / 197])
def test_scales(scale: str | float | None) -> None:
    check(random_qkv(1, 2, 66, 32), torch.float32, kind="eq7", scale=scale)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_padding(variant: str, causal: bool) -> None:
    """Some keys padded, one sequence all padding; what the padded rows hold doesn't matter, even NaN."""
    torch.manual_seed(2)
    inputs = inputs_of(variant, 3, 2, 140, 32, torch.float32)
    padding = torch.zeros(3, 140, dtype=torch.bool)
    padding[0, 100:], padding[1, ::3], padding[2] = True, True, True
    check(inputs, torch.float32, causal=causal, key_padding_mask=padding, **options_of(variant))
    attention = _with_gain_last({"causal": causal, "key_padding_mask": padding, **options_of(variant)})
    q, k, v, *gain = inputs
    poisoned = [x.masked_fill(padding[:, None, :, None], torch.nan) for x in (k, v)]
    assert torch.equal(attention(*inputs), attention(q, *poisoned, *gain))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["packed", "expanded", "transposed", "sliced"])
def test_strides(layout: str, causal: bool) -> None:
    torch.manual_seed(3)
    B, H, N, D = 3, 2, 130, 32
    if layout == "packed":
        inputs = list(torch.randn(B, N, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0))
    elif layout == "expanded":
        inputs = [torch.randn(1, 1, N, D).expand(B, H, N, D) for _ in range(3)]
    elif layout == "transposed":
        inputs = [torch.randn(D, N, H, B).permute(3, 2, 1, 0) for _ in range(3)]
    else:
        inputs = [torch.randn(B, H, 2 * N, 2 * D)[:, :, ::2, ::2] for _ in range(3)]
    for variant in ("eq7", "eq4"):
        check(inputs, torch.float32, causal=causal, **options_of(variant))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_is_the_same_in_one_tensor(variant: str, causal: bool, padded: bool) -> None:
    torch.manual_seed(5)
    *qkv, gain = [*inputs_of(variant, 2, 2, 70, 32, torch.float32), None][:4]
    packed = torch.stack([x.transpose(1, 2) for x in qkv], dim=2)
    padding = torch.arange(70).expand(2, 70) > 60 if padded else None
    options = {"causal": causal, "key_padding_mask": padding, "gain": gain, **options_of(variant)}
    found = output_and_gradients(partial(packed_linear_attention, **options), [packed])
    out, *gradients = output_and_gradients(partial(linear_attention, **options), qkv)
    expected = [out, torch.stack([x.transpose(1, 2) for x in gradients], dim=2)]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_packed_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \(B, N, 3, H, D\)"):
        packed_linear_attention(torch.zeros(2, 5, 2, 2, 4))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["eq4", "eq7"])
@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (2, 0, 5, 4), (2, 2, 0, 4)])
def test_empty(shape: tuple[int, ...], kind: str, causal: bool) -> None:
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    out = linear_attention(q, k, v, kind=kind, causal=causal)
    assert out.shape == shape
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == shape


def test_no_keys() -> None:
    q, empty = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4)
    for kind in ("eq4", "eq7"):
        assert (linear_attention(q, empty, empty, kind=kind, scale=None) == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.0, 1e-13])
@pytest.mark.parametrize("kind", ["eq4", "eq7"])
def test_rows_below_the_norm_floor(kind: str, size: float, dtype: torch.dtype, causal: bool) -> None:
    torch.manual_seed(4)
    q, k, v = random_qkv(2, 2, 70, 32, dtype)
    q[:, :, 3], k[:, :, 5] = size, size
    found = output_and_gradients(lambda *x: linear_attention(*x, kind=kind, causal=causal), [q, k, v])
    truth = output_and_gradients(
        lambda *x: reference(*x, kind=kind, causal=causal), [x.double() for x in (q, k, v)]
    )
    limit = float(torch.finfo(dtype).max)  # float16 gradients of these rows end at its range
    assert_close(found, [x.clamp(-limit, limit) for x in truth], dtype)
    others = [i for i in range(70) if i not in (3, 5)]
    assert_close([x[:, :, others] for x in found], [x[:, :, others] for x in truth], dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_eq4_where_the_denominator_vanishes(dtype: torch.dtype, causal: bool) -> None:
    """All keys against the query: alone, in the first causal row, and in every row."""
    for N in (1, 2, 70):
        row = torch.randn(1, 1, 1, 32).to(dtype)
        q, k = row.expand(1, 1, N, 32), -row.expand(1, 1, N, 32)
        v = torch.randn(1, 1, N, 32).to(dtype)
        attention = partial(linear_attention, kind="eq4", causal=causal)
        assert all(x.isfinite().all() for x in output_and_gradients(attention, [q, k, v]))


@pytest.mark.parametrize("causal", [False, True])
def test_eq4_has_no_gradient_through_a_floored_denominator(causal: bool) -> None:
    """The two weights are 1/2 + 2^-12 and -1/2: their sum is below the floor, what they weigh isn't small."""
    q = torch.zeros(1, 1, 2, 16)
    q[..., 0] = 1.0
    k = torch.zeros(1, 1, 2, 16)
    k[0, 0, :, 0] = torch.tensor([-0.5 + 2**-12, -1.5])
    v = torch.randn(1, 1, 2, 16)
    check([q, k, v], torch.float32, kind="eq4", normalise_qk=False, causal=causal)


def test_gain_of_zero_has_a_gradient() -> None:
    for causal in (False, True):
        inputs = [*random_qkv(1, 2, 130, 16), torch.tensor([0.0, 2.0])]
        check(inputs, torch.float32, kind="eq7", causal=causal)


def test_gain_as_a_number() -> None:
    q, k, v = random_qkv(1, 2, 9, 16)
    expected = linear_attention(q, k, v, gain=torch.tensor([3.0, 3.0]))
    assert torch.equal(linear_attention(q, k, v, gain=3.0), expected)


def test_autocast_casts_all_three() -> None:
    """float32 q and k (out of a norm, say) and bfloat16 v, as autocast produces them."""
    q, k, v = random_qkv(2, 2, 70, 32)
    leaves = [q.requires_grad_(), k.requires_grad_(), v.bfloat16().requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        out = linear_attention(*leaves)
    assert torch.equal(out, linear_attention(*(x.bfloat16() for x in leaves)))
    out.sum().backward()
    assert [x.grad.dtype for x in leaves if x.grad is not None] == [x.dtype for x in leaves]


def test_autocast_leaves_float64_and_the_inside_alone() -> None:
    inputs = random_qkv(2, 2, 70, 32, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        check(inputs, torch.float64, kind="eq7")
        check(inputs, torch.float64, kind="eq4", causal=True)


def test_out_is_laid_out_by_tokens() -> None:
    out = linear_attention(*random_qkv(2, 3, 5, 4))
    assert out.transpose(1, 2).is_contiguous()


SAMPLES: dict[str, dict[str, Any]] = {
    "eq7": {"kind": "eq7", "causal": False, "scale": 0.5, "normalise": True},
    "eq7-causal-length": {"kind": "eq7", "causal": True, "scale": None, "normalise": True},
    "eq4": {"kind": "eq4", "causal": False, "scale": 0.5, "normalise": True},
    "eq4-causal-raw": {"kind": "eq4", "causal": True, "scale": 0.5, "normalise": False},
    "eq7-centred": {"kind": "eq7", "causal": False, "scale": None, "normalise": True, "centre_values": True},
}


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("layout", ["contiguous", "strided", "expanded", "empty", "packed"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_opcheck(sample: str, layout: str, backend: str) -> None:
    qkv = random_qkv(0 if layout == "empty" else 2, 2, 6, 4)
    if layout == "strided":
        qkv = list(torch.randn(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0))
    elif layout == "expanded":
        qkv = [x[:1].expand(2, -1, -1, -1) for x in qkv]
    elif layout == "packed":
        qkv = [torch.randn(2, 6, 3, 2, 4)]
    kind, causal, scale, normalise, *centre_values = SAMPLES[sample].values()
    gain = torch.tensor([1.5, 2.0]) if kind == "eq7" else None
    options = (kind, causal, scale, normalise, *(centre_values or [False]), backend)
    leaves = [x.detach().requires_grad_() for x in qkv]
    leaf_gain = None if gain is None else gain.clone().requires_grad_()
    torch.library.opcheck(torch.ops.clip_la.linear_attention.default, (leaves, leaf_gain, None, *options))
    saved = torch.ops.clip_la.linear_attention(qkv, gain, None, *options)
    arguments = (torch.randn_like(saved[0]), qkv, gain, saved, *options)
    torch.library.opcheck(torch.ops.clip_la.linear_attention_backward.default, arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "softmax"}, "eq4 and eq7"),
        ({"kind": "eq4", "scale": 0.5}, "no scale and no gain"),
        ({"kind": "eq4", "gain": 2.0}, "no scale and no gain"),
        ({"normalise_qk": False}, "belongs to Eq. 4"),
        ({"scale": "tokens"}, '"length" or a number'),
        ({"scale": torch.tensor(0.5)}, '"length" or a number'),
        ({"gain": torch.ones(3)}, r"one number a head, \(2,\)"),
        ({"gain": torch.ones(2, device="meta")}, r"\(2,\) on meta; .* on cpu"),
        ({"gain": "learned"}, r"None, a number or a Tensor \(2,\)"),
        ({"backend": "cuda-magic"}, "expected auto or one of"),
        ({"key_padding_mask": torch.zeros(2, 5)}, r"expected bool \(2, 5\)"),
        ({"key_padding_mask": torch.zeros(5, 2, dtype=torch.bool)}, r"expected bool \(2, 5\)"),
    ],
)
def test_options_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_attention(*random_qkv(2, 2, 5, 4), **change)


@pytest.mark.parametrize(
    ("q", "k", "v", "causal", "message"),
    [
        ((2, 5, 4), (2, 5, 4), (2, 5, 4), False, "four dimensions"),
        ((2, 2, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4), False, "expected q"),
        ((2, 2, 5, 4), (2, 2, 6, 4), (2, 2, 5, 4), False, "expected q"),
        ((2, 2, 5, 4), (2, 2, 5, 3), (2, 2, 5, 3), False, "expected q"),
        ((2, 2, 5, 4), (2, 2, 6, 4), (2, 2, 6, 4), True, "as many queries as keys"),
    ],
)
def test_shapes_that_are_refused(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], causal: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        linear_attention(torch.zeros(q), torch.zeros(k), torch.zeros(v), causal=causal)


def test_forward_mode_is_refused() -> None:
    """torch would take an op without a forward-mode derivative for a constant."""
    q, k, v = random_qkv(1, 2, 5, 4)
    for function, primal in (
        (lambda q: linear_attention(q, k, v), q),
        (lambda gain: linear_attention(q, k, v, gain=gain), torch.ones(2)),
    ):
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.func.jvp(function, (primal,), (torch.ones_like(primal),))


def test_second_derivatives_are_refused() -> None:
    q, k, v = (x.requires_grad_() for x in random_qkv(1, 2, 5, 4))
    (dq,) = torch.autograd.grad(linear_attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="linear_attention_backward"):
        dq.sum().backward()


def test_dtypes_that_are_refused() -> None:
    q, k, v = random_qkv(1, 1, 3, 4)
    with pytest.raises(ValueError, match="expected one of float32, bfloat16"):
        linear_attention(q, k, v.bfloat16())
    with pytest.raises(ValueError, match="expected one of float32, bfloat16"):
        linear_attention(q.int(), k.int(), v.int())
