"""The compiled CPU kernels: every build of them, their segments, and the compiler that is or isn't there."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from accuracy import assert_close, output_and_gradients, random_qkv

from clip_la.attention import native_backend, native_library
from clip_la.attention.dispatch import why_not
from clip_la.attention.op import linear_attention
from clip_la.attention.reference import eq4_attention, eq7_attention

REASON = why_not("native", "cpu", torch.float32)
needs_compiler = pytest.mark.skipif(REASON is not None, reason=str(REASON))
REFERENCES = {"eq4": eq4_attention, "eq7": eq7_attention}


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal sequences are cut in segments as short as the others'."""
    monkeypatch.setattr(native_backend, "_MIN_CAUSAL_SEGMENT", 1024)


@needs_compiler
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["eq4", "eq7"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_sequences_in_segments(dtype: torch.dtype, kind: str, causal: bool) -> None:
    """A single head of 3100 tokens is cut in three segments that end within blocks."""
    qkv = random_qkv(1, 1, 3100, 32, dtype)
    found = output_and_gradients(partial(linear_attention, kind=kind, causal=causal, backend="native"), qkv)
    truth = output_and_gradients(partial(REFERENCES[kind], causal=causal), [x.double() for x in qkv])
    assert_close(found, truth, dtype)


@needs_compiler
@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("option", [None, "causal", "centre_values"])
def test_same_bits_for_any_number_of_threads(option: str | None) -> None:
    qkv = random_qkv(1, 3, 2100, 32)
    attention = partial(linear_attention, **{option: True} if option else {}, backend="native")
    threads, runs = torch.get_num_threads(), []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            runs.append(output_and_gradients(attention, qkv))
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(run, runs[0], strict=True))


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["eq4", "eq7"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_is_written(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str, causal: bool
) -> None:
    """New tensors full of NaN change nothing."""
    qkv = random_qkv(2, 3, 77, 48, dtype)
    attention = partial(linear_attention, kind=kind, causal=causal, backend="native")
    expected = output_and_gradients(attention, qkv)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        found = output_and_gradients(attention, qkv)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@needs_compiler
@pytest.mark.parametrize("causal", [False, True])
def test_sums_of_bfloat16_keep_more_than_bfloat16(causal: bool) -> None:
    """The gain's gradient is float32 and made of S and dS: rounding either to bfloat16 would show at 1e-3."""
    torch.manual_seed(0)  # by bad luck it is nearly 0, and any error is large beside it
    q, k, v = random_qkv(4, 2, 197, 64, torch.bfloat16)
    gain = torch.tensor([1.0, 8.0])
    found = output_and_gradients(
        lambda g: linear_attention(q, k, v, gain=g, causal=causal, backend="native"), [gain]
    )
    truth = output_and_gradients(
        lambda g: eq7_attention(q.double(), k.double(), v.double(), gain=g, causal=causal), [gain.double()]
    )
    torch.testing.assert_close(found[1].double(), truth[1], rtol=1e-4, atol=0)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_isnt_a_number_stays_in_its_sequence(dtype: torch.dtype) -> None:
    qkv = random_qkv(2, 1, 70, 32, dtype)
    qkv[1][0, 0, 5, 7] = torch.nan
    out, *gradients = output_and_gradients(partial(linear_attention, backend="native"), qkv)
    assert out[0].isnan().all()
    assert all(x[1].isfinite().all() for x in [out, *gradients])


CHECK = """
import torch
from accuracy import assert_close, output_and_gradients, random_qkv
from functools import partial
from clip_la.attention.op import linear_attention
from clip_la.attention.reference import eq7_attention
torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    for options in ({}, {"causal": True}, {"centre_values": True}):
        for N, D in ((77, 32), (197, 64), (130, 80)):
            qkv = random_qkv(1, 2, N, D, dtype)
            found = output_and_gradients(partial(linear_attention, **options, backend="native"), qkv)
            truth = output_and_gradients(partial(eq7_attention, **options), [x.double() for x in qkv])
            assert_close(found, truth, dtype)
"""


@needs_compiler
@pytest.mark.parametrize(
    "flags", ["-mno-amx-bf16", "-mno-avx512bf16", "-mno-avx512f", "-fsanitize=undefined"]
)
def test_builds_for_other_cpus(tmp_path: Path, flags: str) -> None:
    """Where there is no AMX, no bfloat16 or no AVX-512, and with undefined behaviour made an error."""
    if flags.startswith("-mno") and os.uname().machine != "x86_64":
        pytest.skip(f"{flags} is for x86-64")
    environment = os.environ | {
        "CLIP_LA_CACHE": str(tmp_path),
        "CXXFLAGS": f"{flags} -fno-sanitize-recover=all",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    result = subprocess.run(
        [sys.executable, "-c", CHECK],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    native_library.load_library.cache_clear()
    with pytest.raises(native_library.NativeUnavailableError, match=r"no C\+\+ compiler .*apt install g\+\+"):
        native_library.load_library()


@needs_compiler
def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLIP_LA_CACHE", str(tmp_path))
    monkeypatch.setenv("CXXFLAGS", "-no-such-option")
    native_library.load_library.cache_clear()
    with pytest.raises(native_library.NativeUnavailableError, match="-no-such-option"):
        native_library.load_library()
    assert list(tmp_path.iterdir()) == []


@needs_compiler
def test_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLIP_LA_CACHE", str(tmp_path))
    native_library.load_library.cache_clear()
    native_library.load_library()
    (library,) = tmp_path.iterdir()
    written = library.stat().st_mtime_ns
    native_library.load_library.cache_clear()
    native_library.load_library()
    assert library.stat().st_mtime_ns == written


@needs_compiler
def test_a_cache_that_cant_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("CLIP_LA_CACHE", str(file / "cache"))
    native_library.load_library.cache_clear()
    with pytest.raises(native_library.NativeUnavailableError, match="can't be kept or loaded"):
        native_library.load_library()
