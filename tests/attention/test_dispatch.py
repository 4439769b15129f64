"""Which backend serves which call."""

from __future__ import annotations

import pytest
import torch
from accuracy import random_qkv

from clip_la.attention import native_backend
from clip_la.attention.dispatch import BACKENDS, explain_choice, which, why_not
from clip_la.attention.op import linear_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_has_compiled_kernels(dtype: torch.dtype) -> None:
    reason = why_not("native", "cpu", dtype)
    if reason is not None:
        pytest.skip(reason)
    assert which("cpu", dtype) == "native"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_torch_serves_what_no_other_can(dtype: torch.dtype) -> None:
    assert which("cpu", dtype) == "torch"
    assert which("meta", torch.float32) == "torch"


def test_the_one_asked_for() -> None:
    assert which("cpu", torch.float32, backend="torch") == "torch"


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_environment_names_the_default(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setenv("CLIP_LA_BACKEND", backend)
    reason = why_not(backend, "cpu", torch.float32)
    if reason is None:
        assert which("cpu", torch.float32) == backend
    else:
        with pytest.raises(ValueError, match=f"backend '{backend}' can't serve this call"):
            which("cpu", torch.float32)


def test_no_such_backend() -> None:
    with pytest.raises(ValueError, match=r"'cuda-magic'; expected auto or one of .*torch"):
        which("cpu", torch.float32, backend="cuda-magic")


@pytest.mark.parametrize(
    ("dtype", "D", "reason"),
    [(torch.float64, 64, "takes float32 and bfloat16"), (torch.float32, 512, "heads of up to 256 elements")],
)
def test_what_was_asked_for_and_cant_serve_is_an_error(dtype: torch.dtype, D: int, reason: str) -> None:
    with pytest.raises(ValueError, match=f"'native' can't serve this call: .*{reason}"):
        linear_attention(*random_qkv(1, 1, 2, D, dtype), backend="native")


def test_wide_heads_go_to_torch() -> None:
    assert which("cpu", torch.float32, head_size=native_backend.MAX_HEAD_SIZE + 1) == "torch"


def test_the_choice_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torch (triton: " in explain_choice("cpu", torch.float64)
    assert "native: it takes float32 and bfloat16" in explain_choice("cpu", torch.float64)
    monkeypatch.setenv("CLIP_LA_BACKEND", "torch")
    assert explain_choice("cpu", torch.float64).startswith("torch")
