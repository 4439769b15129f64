"""The causal mask is read once in its life, and never mistaken for another tensor."""

from __future__ import annotations

import math

import pytest
import torch

from clip_la.attention import masks
from clip_la.attention.masks import require_causal


def causal_mask(n: int) -> torch.Tensor:
    return torch.full((n, n), -math.inf).triu(1)


@pytest.fixture
def num_reads(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one at each reading of a mask."""
    reads: list[None] = []
    read = masks._is_causal

    def counting(mask: torch.Tensor) -> bool:
        reads.append(None)
        return read(mask)

    monkeypatch.setattr(masks, "_is_causal", counting)
    return reads


def test_read_once(num_reads: list[None]) -> None:
    mask = causal_mask(5)
    for _ in range(3):
        require_causal(mask, 5)
    assert len(num_reads) == 1


def test_read_again_after_a_write(num_reads: list[None]) -> None:
    mask = causal_mask(5)
    require_causal(mask, 5)
    mask[0, 4] = 0.0
    with pytest.raises(ValueError, match="not the causal mask"):
        require_causal(mask, 5)
    assert len(num_reads) == 2


def test_freed_masks_are_forgotten() -> None:
    """A wrong mask is refused even where it takes the place in memory of a right one."""
    for _ in range(50):
        mask = causal_mask(5)
        require_causal(mask, 5)
        del mask
        with pytest.raises(ValueError, match="not the causal mask"):
            require_causal(torch.zeros(5, 5), 5)
    assert not any(mask.shape == (5, 5) for mask in masks._RECOGNISED)


def test_inference_tensors_are_read_each_time(num_reads: list[None]) -> None:
    with torch.inference_mode():
        mask = causal_mask(5)
    require_causal(mask, 5)
    require_causal(mask, 5)
    assert len(num_reads) == 2


def test_meta_tensors_have_nothing_to_read() -> None:
    require_causal(torch.empty(5, 5, device="meta"), 5)
