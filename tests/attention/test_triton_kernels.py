"""The Triton backend against the float64 reference: on a GPU, or interpreted on the CPU.

Interpreted, they run in a process of their own (`test_triton_interpreted.py`): Triton decides on import.
All memory is NaN before a kernel writes to it, and operations that aren't deterministic are errors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from accuracy import assert_close, output_and_gradients, random_qkv
from torch import Tensor

from clip_la.attention import triton_launch
from clip_la.attention.op import linear_attention, packed_linear_attention
from clip_la.attention.reference import eq4_attention, eq7_attention
from clip_la.attention.triton_backend import MAX_HEAD_SIZES

VARIANTS: dict[str, dict[str, Any]] = {
    "eq7-gain": {"kind": "eq7", "scale": "length"},
    "eq4": {"kind": "eq4"},
    "eq7": {"kind": "eq7"},
    "eq4-raw": {"kind": "eq4", "normalise_qk": False},
}
CENTRED: dict[str, Any] = {"kind": "eq7", "scale": "length", "centre_values": True}
HEAD_SIZES = [32, 64, 80, 96, 128]
LENGTHS = [1, 2, 63, 64, 65, 77, 127, 128, 197, 257]
LONG = [pytest.param(N, marks=pytest.mark.slow) for N in (577, 1025)]
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@pytest.fixture(
    params=[pytest.param("cpu", id="interpreted"), pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the kernels run, with all uninitialised memory NaN."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("run by test_triton_interpreted.py, with TRITON_INTERPRET=1")
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield request.param
    torch.use_deterministic_algorithms(False)


def centred_inputs(B: int, H: int, N: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    """With a gain, and values whose means, one a column, are 30 times their spread."""
    q, k, v, gain = inputs_of("eq7-gain", B, H, N, D, dtype)
    return [q, k, (v.double() + 30 * (1.0 - 2 * torch.randint(0, 2, (H, 1, D)))).to(dtype), gain]


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are shared among programs from two tiles on."""
    monkeypatch.setattr(triton_launch, "GROUP_TOKENS", 64)


def attention(*inputs: Tensor, device: str, **options: Any) -> Tensor:
    """The Triton backend on q, k, v and perhaps the gain."""
    q, k, v, *gain = (x.to(device) for x in inputs)
    mask = options.pop("key_padding_mask", None)
    options |= {"gain": gain[0]} if gain else {}
    mask = None if mask is None else mask.to(device)
    return linear_attention(q, k, v, key_padding_mask=mask, backend="triton", **options).cpu()


def reference(*inputs: Tensor, kind: str, **options: Any) -> Tensor:
    if kind == "eq4":
        return eq4_attention(*inputs, **options)
    q, k, v, *gain = inputs
    return eq7_attention(q, k, v, **options | ({"gain": gain[0]} if gain else {}))


def check(inputs: list[Tensor], device: str, **options: Any) -> None:
    found = output_and_gradients(partial(attention, device=device, **options), inputs)
    truth = output_and_gradients(partial(reference, **options), [x.double() for x in inputs])
    one_key = options["kind"] == "eq4" and inputs[1].shape[2] == 1  # then dq and dk vanish
    assert_close(found[:4], truth[:4], inputs[0].dtype, least_size=0.1 if one_key else 1e-12)
    # Sums over all tokens of numbers with random signs, of about this size (the gain's gradient), may cancel.
    assert_close(found[4:], truth[4:], inputs[0].dtype, least_size=float(truth[0].norm()))
    assert [x.dtype for x in found[1:]] == [x.dtype for x in inputs]


def inputs_of(variant: str, B: int, H: int, N: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    q, k, v = random_qkv(B, H, N, D, dtype)
    if variant == "eq4-raw":
        q, k = q * 0.25, k * 0.25
    return [q, k, v, *([torch.linspace(1.0, 8.0, H)] if variant == "eq7-gain" else [])]


@CAUSAL
@pytest.mark.parametrize("variant", ["eq7-gain", "eq4"])
@pytest.mark.parametrize("N", [*LENGTHS, *LONG])
def test_lengths(N: int, variant: str, causal: bool, device: str) -> None:
    check(inputs_of(variant, 1, 1, N, 32, torch.bfloat16), device, causal=causal, **VARIANTS[variant])


@CAUSAL
@pytest.mark.parametrize(
    ("dtype", "D"),
    [(dtype, D) for dtype, most in MAX_HEAD_SIZES.items() for D in HEAD_SIZES if most >= D],
)
def test_head_sizes_and_dtypes(D: int, dtype: torch.dtype, causal: bool, device: str) -> None:
    variant = list(VARIANTS)[(D // 16 + causal) % len(VARIANTS)]
    check(inputs_of(variant, 1, 1, 70, D, dtype), device, causal=causal, **VARIANTS[variant])


@CAUSAL
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_in_several_tiles(variant: str, causal: bool, device: str) -> None:
    check(inputs_of(variant, 1, 2, 66, 32, torch.float32), device, causal=causal, **VARIANTS[variant])


@CAUSAL
@pytest.mark.parametrize("variant", ["eq7-gain", "eq4"])
def test_heads_shared_among_programs(variant: str, causal: bool, device: str, small_groups: None) -> None:
    check(inputs_of(variant, 1, 2, 200, 32, torch.bfloat16), device, causal=causal, **VARIANTS[variant])


@pytest.mark.parametrize("variant", ["eq7-gain", "eq4"])
def test_cross_attention(variant: str, device: str, small_groups: None) -> None:
    """M keys other than N queries, rows of v of another size; in one program and in several."""
    q, k, v, *gain = inputs_of(variant, 1, 1, 150, 48, torch.bfloat16)
    check([q, k[:, :, :70], v[:, :, :70, :33], *gain], device, **VARIANTS[variant])
    check([q, k[:, :, :130], v[:, :, :130, :16], *gain], device, **VARIANTS[variant])


@CAUSAL
def test_rows_that_share_a_direction(causal: bool, device: str) -> None:
    """Then dq and dk of Eq. 4 are small differences of large parts."""
    q, k, v = random_qkv(1, 1, 200, 32, torch.bfloat16)
    check([q + 0.5, k + 0.5, v + 1.0], device, kind="eq4", causal=causal)


@CAUSAL
@pytest.mark.parametrize("layout", ["packed", "expanded", "transposed", "sliced", "unaligned"])
def test_strides(layout: str, causal: bool, device: str) -> None:
    B, H, N, D = 2, 2, 40, 32
    if layout == "packed":
        inputs = list(torch.randn(B, N, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0))
    elif layout == "expanded":
        inputs = [torch.randn(1, 1, N, D).expand(B, H, N, D) for _ in range(3)]
    elif layout == "transposed":
        inputs = [torch.randn(D, N, H, B).permute(3, 2, 1, 0) for _ in range(3)]
    elif layout == "sliced":
        inputs = [torch.randn(B, H, 2 * N, 2 * D)[:, :, ::2, ::2] for _ in range(3)]
    else:
        inputs = [torch.randn(B, H, N, D + 1)[..., 1:] for _ in range(3)]
    check(inputs, device, kind="eq4", causal=causal)


@CAUSAL
def test_packed_is_the_same_in_one_tensor(causal: bool, device: str) -> None:
    *qkv, gain = inputs_of("eq7-gain", 2, 2, 70, 32, torch.float32)
    packed = torch.stack([x.transpose(1, 2) for x in qkv], dim=2).to(device)
    options: dict[str, Any] = {"causal": causal, "gain": gain.to(device), "backend": "triton"}
    out, dpacked = output_and_gradients(partial(packed_linear_attention, **options), [packed])
    expected, *gradients = output_and_gradients(
        partial(linear_attention, **options), [x.to(device) for x in qkv]
    )
    assert torch.equal(out, expected)
    assert torch.equal(dpacked, torch.stack([x.transpose(1, 2) for x in gradients], dim=2))


@CAUSAL
@pytest.mark.parametrize("kind", ["eq4", "eq7"])
def test_padding(kind: str, causal: bool, device: str) -> None:
    """Some keys padded, one sequence all padding."""
    padding = torch.zeros(3, 70, dtype=torch.bool)
    padding[0, 50:], padding[1, ::3], padding[2] = True, True, True
    inputs = random_qkv(3, 1, 70, 32)
    check(inputs, device, kind=kind, causal=causal, key_padding_mask=padding)


@pytest.mark.parametrize("N", [2, 17, 64, 197, *LONG])
def test_centred_values_of_any_length(N: int, device: str) -> None:
    check(centred_inputs(1, 1, N, 32, torch.bfloat16), device, **CENTRED)


@pytest.mark.parametrize(
    ("dtype", "D"),
    [(dtype, D) for dtype, most in MAX_HEAD_SIZES.items() for D in HEAD_SIZES if most >= D],
)
def test_centred_values_far_from_zero(D: int, dtype: torch.dtype, device: str) -> None:
    check(centred_inputs(1, 2, 70, D, dtype), device, **CENTRED)


@pytest.mark.parametrize("dtype", MAX_HEAD_SIZES)
def test_centred_values_in_groups(dtype: torch.dtype, device: str, small_groups: None) -> None:
    check(centred_inputs(1, 2, 200, 32, dtype), device, **CENTRED)


@pytest.mark.parametrize(("N", "M"), [(150, 70), (1, 40), (140, 130)])
def test_centred_values_of_other_keys(N: int, M: int, device: str, small_groups: None) -> None:
    q, k, v, gain = centred_inputs(1, 1, max(N, M), 48, torch.bfloat16)
    check([q[:, :, :N], k[:, :, :M], v[:, :, :M, :33], gain], device, **CENTRED)


@pytest.mark.parametrize("dtype", MAX_HEAD_SIZES)
def test_centred_values_of_one_key(dtype: torch.dtype, device: str) -> None:
    q, k, v, gain = centred_inputs(1, 2, 5, 32, dtype)
    run = partial(attention, device=device, **CENTRED)
    for N in (1, 5):
        inputs = [q[:, :, :N], k[:, :, :1], v[:, :, :1], gain]
        out, *gradients = output_and_gradients(run, inputs)
        assert (out == 0).all()
        assert all(x.abs().max() <= 1e-2 for x in gradients)


def test_centred_values_padded_and_packed(device: str) -> None:
    padding = torch.zeros(2, 40, dtype=torch.bool)
    padding[0, 30:], padding[1] = True, True
    q, k, v, gain = centred_inputs(2, 2, 40, 32, torch.float32)
    check([q, k, v, gain], device, key_padding_mask=padding, **CENTRED)
    packed = torch.stack([x.transpose(1, 2) for x in (q, k, v)], dim=2)
    check([*packed.permute(2, 0, 3, 1, 4).unbind(0), gain], device, **CENTRED)


@CAUSAL
@pytest.mark.parametrize("kind", ["eq4", "eq7"])
@pytest.mark.parametrize("shape", [(0, 2, 5, 16), (2, 0, 5, 16), (2, 2, 0, 16)])
def test_empty(shape: tuple[int, ...], kind: str, causal: bool, device: str) -> None:
    q, k, v = (torch.randn(shape) for _ in range(3))
    out, *gradients = output_and_gradients(
        partial(attention, device=device, kind=kind, causal=causal), [q, k, v]
    )
    assert [x.shape for x in (out, *gradients)] == [shape] * 4


def test_no_keys(device: str) -> None:
    q, empty = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 0, 16)
    for options in ({"kind": "eq4"}, {"kind": "eq7"}, CENTRED):
        out, *gradients = output_and_gradients(
            partial(attention, device=device, **options), [q, empty, empty]
        )
        assert (out == 0).all()
        assert (gradients[0] == 0).all()


@CAUSAL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.0, 1e-13])
def test_rows_below_the_norm_floor(size: float, dtype: torch.dtype, causal: bool, device: str) -> None:
    q, k, v = random_qkv(1, 1, 20, 32, dtype)
    q[:, :, 3], k[:, :, 5] = size, size
    found = output_and_gradients(partial(attention, device=device, kind="eq4", causal=causal), [q, k, v])
    truth = output_and_gradients(
        partial(reference, kind="eq4", causal=causal), [x.double() for x in (q, k, v)]
    )
    limit = float(torch.finfo(dtype).max)  # float16 gradients of these rows end at its range
    assert_close(found, [x.clamp(-limit, limit) for x in truth], dtype)
    others = [i for i in range(20) if i not in (3, 5)]
    assert_close([x[:, :, others] for x in found], [x[:, :, others] for x in truth], dtype)


@CAUSAL
def test_eq4_where_the_denominator_vanishes(causal: bool, device: str) -> None:
    """All keys against the query: alone, in the first causal row, and in every row."""
    for N in (1, 2, 70):
        row = torch.randn(1, 1, 1, 32).bfloat16()
        q, k, v = row.expand(1, 1, N, 32), -row.expand(1, 1, N, 32), torch.randn(1, 1, N, 32).bfloat16()
        run = partial(attention, device=device, kind="eq4", causal=causal)
        assert all(x.isfinite().all() for x in output_and_gradients(run, [q, k, v]))


@CAUSAL
@pytest.mark.parametrize(
    ("dtype", "D", "N"),
    [
        (torch.bfloat16, 32, 140),
        *((torch.bfloat16, 64, N) for N in (77, 140)),
        *((torch.bfloat16, D, 40) for D in (80, 96, 128)),
        *((dtype, D, 20) for dtype in (torch.float16, torch.float32) for D in (32, 64)),
    ],
)
def test_whole_numbers_are_exact(dtype: torch.dtype, D: int, N: int, causal: bool, device: str) -> None:
    """Rows along an axis, powers of two long: no sum needs rounding, so that every bit can be asked for.

    In every configuration of tiles and warps, in more than one tile and in the tile of a text.
    """

    def along_an_axis() -> Tensor:
        lengths = 2.0 ** torch.randint(-2, 3, (1, 2, N, 1)) * (1 - 2 * torch.randint(0, 2, (1, 2, N, 1)))
        return lengths * torch.nn.functional.one_hot(torch.randint(0, D, (1, 2, N)), D)

    v = torch.randint(-2, 3, (1, 2, N, D)).float()
    inputs = [x.to(dtype) for x in (along_an_axis(), along_an_axis(), v)]
    inputs.append(torch.tensor([2.0, -4.0]))
    dout = torch.randint(-2, 3, (1, 2, N, D)).to(dtype)
    options: dict[str, Any] = {"kind": "eq7", "causal": causal}
    found = _gradients(partial(attention, device=device, **options), inputs, dout)
    truth = _gradients(partial(reference, **options), [x.double() for x in inputs], dout.double())
    for x, expected in zip(found, truth, strict=True):
        assert torch.equal(x, expected.to(x.dtype))


def _gradients(run: Any, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@CAUSAL
def test_same_bits_every_time(causal: bool, device: str, small_groups: None) -> None:
    inputs = inputs_of("eq7-gain", 1, 2, 140, 32, torch.bfloat16)
    run = partial(attention, device=device, causal=causal)
    runs = [output_and_gradients(run, inputs) for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("kind", "causal", "centre_values"), [("eq4", True, False), ("eq7", False, False), ("eq7", False, True)]
)
def test_opcheck(kind: str, causal: bool, centre_values: bool, device: str) -> None:
    packed = torch.randn(1, 6, 3, 2, 16, device=device)
    gain = torch.tensor([1.5, 2.0], device=device) if kind == "eq7" else None
    options = (kind, causal, 0.5, True, centre_values, "triton")
    leaf_gain = None if gain is None else gain.clone().requires_grad_()
    arguments = ([packed.clone().requires_grad_()], leaf_gain, None, *options)
    torch.library.opcheck(torch.ops.clip_la.linear_attention.default, arguments)
    saved = torch.ops.clip_la.linear_attention([packed], gain, None, *options)
    arguments = (torch.randn_like(saved[0]), [packed], gain, saved, *options)
    torch.library.opcheck(torch.ops.clip_la.linear_attention_backward.default, arguments)


@pytest.mark.gpu
@pytest.mark.slow
def test_offsets_beyond_32_bits() -> None:
    """More than 2^31 elements in a tensor: the last head is as right as if it were alone."""
    packed = torch.randn(1, 1 << 19, 3, 24, 64, dtype=torch.bfloat16, device="cuda")
    for causal in (False, True):
        options: dict[str, Any] = {"causal": causal, "scale": "length", "backend": "triton"}
        whole = packed_linear_attention(packed, **options)[:, -1:]
        alone = packed_linear_attention(packed[:, :, :, -1:].contiguous(), **options)
        torch.testing.assert_close(whole, alone, rtol=2e-2, atol=2e-3)
