"""What the Triton backend serves, and what its calls launch; nothing is compiled or run here."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from clip_la.attention import triton_backend
from clip_la.attention.contract import Inputs, Options, empty_forward
from clip_la.attention.dispatch import which
from clip_la.attention.triton_launch import Launch, aligned, is_aligned, num_groups, recording

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton isn't installed")
CUDA = torch.device("cuda", 0)
META = torch.device("meta")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "head_size", "reason"),
    [
        (torch.bfloat16, 64, None),
        (torch.bfloat16, 128, None),
        (torch.float16, 64, None),
        (torch.float32, 80, "80 elements"),
        (torch.float64, 64, "float64"),
        (torch.bfloat16, 256, "256 elements"),
    ],
)
def test_what_a_hopper_gpu_serves(
    hopper: None, dtype: torch.dtype, head_size: int, reason: str | None
) -> None:
    found = triton_backend.why_not(CUDA, dtype, head_size)
    assert found is None if reason is None else reason in str(found)


@needs_triton
def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert "Hopper" in str(triton_backend.why_not(CUDA, torch.bfloat16, 64))


@needs_triton
def test_the_cpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"'triton' can't serve this call: .*not on cpu"):
        which("cpu", torch.bfloat16, head_size=63, backend="triton")


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "isn't installed" in str(triton_backend.why_not(CUDA, torch.bfloat16, 64))


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (torch.empty(2, 5, 3, 4, 80).permute(2, 0, 3, 1, 4)[1], True),
        (torch.empty(1, 1, 5, 64).expand(2, 3, 5, 64), True),
        (torch.empty(2, 3, 64, 5).mT, False),
        (torch.empty(2, 3, 5, 65)[..., 1:], False),
        (torch.empty(2, 3, 5, 33), False),
        (torch.empty_strided((1, 1, 2, 8), (0, 0, 2**24, 1), device=META), False),
    ],
)
def test_rows_that_kernels_can_read_in_place(x: Tensor, expected: bool) -> None:
    assert is_aligned(x) == expected
    assert is_aligned(aligned(x))
    assert (aligned(x) is x) == expected


@pytest.mark.parametrize(
    ("num_heads", "num_tokens", "expected"),
    [(3072, 197, 1), (1, 1024, 1), (1, 2048, 2), (3072, 65536, 1), (32, 65536, 17), (0, 4096, 1)],
)
def test_heads_are_shared_where_they_are_few_and_long(num_heads: int, num_tokens: int, expected: int) -> None:
    assert num_groups(num_heads, num_tokens, META) == expected


def _launches(N: int, causal: bool) -> list[Launch]:
    options = Options("eq7", causal, None, normalise=True)
    q, k, v = torch.empty(4, N, 3, 8, 64, dtype=torch.bfloat16, device=META).permute(2, 0, 3, 1, 4).unbind(0)
    inputs = Inputs(q, k, v, None, None, options)
    with recording() as launches:
        triton_backend.forward(inputs, empty_forward(inputs))
    return launches


@needs_triton
@pytest.mark.parametrize(
    ("N", "causal", "names"),
    [
        (197, False, ["full_forward"]),
        (4096, False, ["group_sums", "queries"]),
        (77, True, ["tile_forward"]),
        (300, True, ["scan_forward"]),
        (4096, True, ["group_sums", "exclusive_sums", "scan_forward"]),
    ],
)
def test_what_a_call_launches(N: int, causal: bool, names: list[str]) -> None:
    assert [x.kernel.__name__ for x in _launches(N, causal)] == [f"{name}_kernel" for name in names]


@needs_triton
@pytest.mark.parametrize("lengths", [(129, 197, 1000), (2048, 4097, 65536)])
@pytest.mark.parametrize("causal", [False, True])
def test_no_length_is_compiled_in(lengths: tuple[int, ...], causal: bool) -> None:
    """Every number that isn't a stride of a tensor is left out of what Triton specialises kernels for."""
    compiled = set()
    for N in lengths:
        for kernel, _, arguments, config in _launches(N, causal):
            numbers = [p for p, x in zip(kernel.params, arguments, strict=False) if type(x) is int]
            assert all(p.do_not_specialize or p.is_constexpr for p in numbers)
            compiled.add((kernel.__name__, config))
    assert len(compiled) == len(_launches(lengths[0], causal))
