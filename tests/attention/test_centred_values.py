"""Eq. 7 of values less their mean, by every backend, against the float64 reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from accuracy import assert_close, output_and_gradients, random_qkv
from torch import Tensor

from clip_la.attention.dispatch import BACKENDS, why_not
from clip_la.attention.op import linear_attention, packed_linear_attention
from clip_la.attention.reference import eq7_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
OPTIONS: dict[str, Any] = {"scale": "length", "centre_values": True}


def attention(q: Tensor, k: Tensor, v: Tensor, gain: Tensor | None = None, **options: Any) -> Tensor:
    return linear_attention(q, k, v, gain=gain, **OPTIONS | options)


def truth(q: Tensor, k: Tensor, v: Tensor, gain: Tensor | None = None, **options: Any) -> Tensor:
    return eq7_attention(q, k, v, gain=gain, **OPTIONS | options)


def check(inputs: list[Tensor], dtype: torch.dtype, **options: Any) -> None:
    expected = output_and_gradients(partial(truth, **options), [x.double() for x in inputs])
    for backend in backends(dtype):
        found = output_and_gradients(partial(attention, backend=backend, **options), inputs)
        assert_close(found, expected, dtype, least_size=1e-2)


def backends(dtype: torch.dtype) -> list[str]:
    return [backend for backend in BACKENDS if why_not(backend, "cpu", dtype) is None]


def gain_of(H: int, dtype: torch.dtype) -> Tensor:
    return torch.linspace(1.0, 8.0, H, dtype=torch.promote_types(dtype, torch.float32))


def far_from_zero(v: Tensor) -> Tensor:
    """Values whose means, one a column, are 30 times their spread, rounded to their dtype."""
    signs = 1.0 - 2 * torch.randint(0, 2, (1, v.shape[1], 1, v.shape[3]))
    return (v.double() + 30 * signs).to(v.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [2, 63, 65, 197, 1025])
def test_lengths_and_dtypes(N: int, dtype: torch.dtype) -> None:
    torch.manual_seed(N)
    check([*random_qkv(2, 3, N, 64, dtype), gain_of(3, dtype)], dtype)


def test_values_far_from_zero() -> None:
    """What is left after the mean is small beside it."""
    torch.manual_seed(1)
    q, k, v = random_qkv(2, 2, 150, 32, torch.float32)
    check([q, k + 0.5, v + 3.0, gain_of(2, torch.float32)], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_gain", [False, True])
@pytest.mark.parametrize("N", [17, 197])
def test_means_of_30_spreads(N: int, with_gain: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(N)
    q, k, v = random_qkv(2, 3, N, 32, dtype)
    check([q, k, far_from_zero(v), *([gain_of(3, dtype)] if with_gain else [])], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_sequences_far_from_zero(dtype: torch.dtype) -> None:
    """The native backend cuts one head of 3100 tokens in segments, the torch backend several in pieces."""
    torch.manual_seed(7)
    for B, N in ((1, 3100), (9, 1300)):
        q, k, v = random_qkv(B, 1, N, 64, dtype)
        check([q, k, far_from_zero(v), gain_of(1, dtype)], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("N", "M", "D", "E"),
    [(70, 66, 32, 16), (1, 7, 32, 32), (9, 200, 64, 64), (33, 130, 80, 48), (64, 65, 128, 128), (3, 2, 5, 7)],
)
def test_cross_attention(N: int, M: int, D: int, E: int, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    q, k, v = random_qkv(2, 2, max(N, M), max(D, E), dtype)
    check([q[:, :, :N, :D], k[:, :, :M, :D], far_from_zero(v[:, :, :M, :E]), gain_of(2, dtype)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [1, 5])
def test_one_key(N: int, dtype: torch.dtype) -> None:
    """Its value is its own mean: nothing is left, to the bit. Gradients are differences of some hundreds."""
    torch.manual_seed(3)
    q, k, v = random_qkv(2, 2, N, 32, dtype)
    inputs = [q, k[:, :, :1], far_from_zero(v[:, :, :1]), gain_of(2, dtype)]
    for backend in backends(dtype):
        out, *gradients = output_and_gradients(partial(attention, backend=backend), inputs)
        assert (out == 0).all()
        assert all(x.abs().max() <= 1e-2 for x in gradients)


def test_no_keys() -> None:
    q, empty = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 0, 16)
    for backend in backends(torch.float32):
        out, dq, *_ = output_and_gradients(partial(attention, backend=backend), [q, empty, empty])
        assert (out == 0).all()
        assert (dq == 0).all()


@pytest.mark.parametrize("layout", ["packed", "expanded", "transposed", "sliced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_and_memory_full_of_nan(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, layout: str
) -> None:
    torch.manual_seed(8)
    B, H, N, D = 2, 3, 77, 48
    if layout == "packed":
        inputs = list(torch.randn(B, N, 3, H, D).to(dtype).permute(2, 0, 3, 1, 4).unbind(0))
    elif layout == "expanded":
        inputs = [x.expand(B, H, N, D) for x in random_qkv(1, 1, N, D, dtype)]
    elif layout == "transposed":
        inputs = [x.permute(3, 2, 1, 0) for x in random_qkv(D, N, H, B, dtype)]
    else:
        inputs = [x[:, :, ::2, ::2] for x in random_qkv(B, H, 2 * N, 2 * D, dtype)]
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        check([*inputs, gain_of(H, dtype)], dtype)
    finally:
        torch.use_deterministic_algorithms(False)


def test_padding() -> None:
    """The mean is over the keys that are not padded; what the padded rows hold doesn't matter, even NaN."""
    torch.manual_seed(3)
    q, k, v = random_qkv(3, 2, 140, 32)
    padding = torch.zeros(3, 140, dtype=torch.bool)
    padding[0, 100:], padding[1, ::3], padding[2] = True, True, True
    gain = gain_of(2, torch.float32)
    check([q, k, v, gain], torch.float32, key_padding_mask=padding)
    poisoned = [x.masked_fill(padding[:, None, :, None], torch.nan) for x in (k, v)]
    plain = attention(q, k, v, gain, key_padding_mask=padding)
    assert torch.equal(plain, attention(q, *poisoned, gain, key_padding_mask=padding))


def test_packed_equals_unpacked_and_leaves_its_input_alone() -> None:
    torch.manual_seed(4)
    packed = torch.randn(2, 90, 3, 2, 32)
    before, gain = packed.clone(), gain_of(2, torch.float32)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    found = output_and_gradients(lambda x: packed_linear_attention(x, gain=gain, **OPTIONS), [packed])
    apart = output_and_gradients(partial(attention, gain=gain), [q, k, v])
    assert torch.equal(packed, before)
    torch.testing.assert_close(found[0], apart[0])
    torch.testing.assert_close(found[1].permute(2, 0, 3, 1, 4), torch.stack(apart[1:]))


def test_a_constant_added_to_the_values_changes_nothing() -> None:
    torch.manual_seed(5)
    q, k, v = random_qkv(1, 2, 50, 32, torch.float64)
    gain = gain_of(2, torch.float64)
    torch.testing.assert_close(attention(q, k, v + 3.0, gain), attention(q, k, v, gain))


def test_gradcheck_and_opcheck() -> None:
    torch.manual_seed(6)
    inputs = [x.double().requires_grad_() for x in (*random_qkv(1, 2, 5, 3), gain_of(2, torch.float64))]
    assert torch.autograd.gradcheck(attention, inputs)
    args = (inputs[:3], inputs[3], None, "eq7", False, None, True, True, "auto")
    torch.library.opcheck(torch.ops.clip_la.linear_attention.default, args)


@pytest.mark.parametrize("wrong", [{"causal": True}, {"kind": "eq4", "scale": None, "gain": None}])
def test_refusals(wrong: dict[str, Any]) -> None:
    q, k, v = random_qkv(1, 1, 4, 8)
    options = {"gain": 2.0, **OPTIONS, **wrong}
    with pytest.raises(ValueError, match=r"it belongs to Eq. 7 that isn't causal"):
        linear_attention(q, k, v, **options)
