"""How the torch backend cuts its work, and what it keeps for backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from accuracy import output_and_gradients, random_qkv
from torch import Tensor

from clip_la.attention import torch_parts
from clip_la.attention.op import linear_attention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["eq4", "eq7"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_add_up(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str, causal: bool) -> None:
    """Many small pieces give what one piece gives: sequence by sequence, 128 tokens at a time."""
    qkv = random_qkv(3, 2, 300, 16, dtype)
    attention = partial(linear_attention, kind=kind, causal=causal, backend="torch")
    monkeypatch.setattr(torch_parts, "_PIECE_ELEMENTS", 2**40)
    whole = output_and_gradients(attention, qkv)
    monkeypatch.setattr(torch_parts, "_PIECE_ELEMENTS", 1)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    for x, y in zip(output_and_gradients(attention, qkv), whole, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["eq4", "eq7"])
def test_keeps_no_copies_and_nothing_quadratic(kind: str, causal: bool) -> None:
    """For backward: q, k, v and out themselves, norms and denominators (three numbers a token), and S."""
    B, H, N, D = 2, 2, 600, 16
    qkv = [x.requires_grad_() for x in random_qkv(B, H, N, D)]
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        linear_attention(*qkv, kind=kind, causal=causal, backend="torch")
    assert sum(kept.values()) <= B * H * (4 * N * D + 3 * N + D * D + D)


def test_same_bits_every_time() -> None:
    qkv = random_qkv(4, 2, 200, 32)
    runs = [output_and_gradients(partial(linear_attention, backend="torch"), qkv) for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))
