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

OPTIONS: dict[str, Any] = {"scale": "length", "centre_values": True}


def attention(q: Tensor, k: Tensor, v: Tensor, gain: Tensor, **options: Any) -> Tensor:
    return linear_attention(q, k, v, gain=gain, **OPTIONS | options)


def truth(q: Tensor, k: Tensor, v: Tensor, gain: Tensor, **options: Any) -> Tensor:
    return eq7_attention(q, k, v, gain=gain, **OPTIONS | options)


def check(inputs: list[Tensor], dtype: torch.dtype, **options: Any) -> None:
    expected = output_and_gradients(partial(truth, **options), [x.double() for x in inputs])
    for backend in BACKENDS:
        if why_not(backend, "cpu", dtype) is None:
            found = output_and_gradients(partial(attention, backend=backend, **options), inputs)
            assert_close(found, expected, dtype, least_size=1e-2)


def gain_of(H: int, dtype: torch.dtype) -> Tensor:
    return torch.linspace(1.0, 8.0, H, dtype=torch.promote_types(dtype, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("N", [2, 63, 65, 197, 1025])
def test_lengths_and_dtypes(N: int, dtype: torch.dtype) -> None:
    torch.manual_seed(N)
    check([*random_qkv(2, 3, N, 64, dtype), gain_of(3, dtype)], dtype)


def test_values_far_from_zero() -> None:
    """What is left after the mean is small beside it."""
    torch.manual_seed(1)
    q, k, v = random_qkv(2, 2, 150, 32, torch.float32)
    check([q, k + 0.5, v + 3.0, gain_of(2, torch.float32)], torch.float32)


def test_cross_attention() -> None:
    torch.manual_seed(2)
    q, k, v = random_qkv(2, 2, 70, 32)
    check([q, k[:, :, :66], v[:, :, :66, :16], gain_of(2, torch.float32)], torch.float32)


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
