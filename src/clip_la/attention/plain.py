"""The operator in a few plain torch operations, for graphs that leave torch (ONNX): forward only.

It stands in for the custom op where a traced graph is decomposed, so nothing in the models changes for it:

    torch.export.export(tower, inputs).run_decompositions(DECOMPOSITIONS)

Not causal it costs O(M), as the op does; causal it is one masked tile, right for the lengths of texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clip_la.attention import op
from clip_la.attention.contract import Forward, Options, accumulator
from clip_la.attention.reference import EQ4_FLOOR, NORM_FLOOR


def plain_linear_attention(
    qkv: Sequence[Tensor], gain: Tensor | None, num_keys: Tensor | None, *args: Any
) -> Forward:
    """What `torch.ops.clip_la.linear_attention` returns as `out`; what only backward reads is left empty.

    Args:
        qkv, gain, num_keys, args: as the op takes them (`clip_la.attention.op`).
    """
    options = Options(*args[:-1])
    dtype = qkv[0].dtype
    q, k, v = (x.to(accumulator(dtype)) for x in op._unpack(qkv))
    if options.normalise:
        q, k = (torch.nn.functional.normalize(x, dim=-1, eps=NORM_FLOOR) for x in (q, k))
    if gain is not None:
        q = q * gain.to(q.dtype)[:, None, None]
    if options.centre_values:
        v = v - v.mean(-2, keepdim=True)
    sums = _causal_sums if options.causal else _sums
    if options.has_denominator:
        weighted, dots, visible = sums(q, k, v)
        out = weighted / _floored(dots + (visible if num_keys is None else num_keys))
    else:
        scale = 1.0 / k.shape[-2] if options.scale is None else options.scale
        out = scale * sums(q, k, v)[0]
    nothing = out.new_empty(0)
    return Forward(out.to(dtype), *[nothing] * (len(Forward._fields) - 1))


def _sums(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
    """sum_n (1 + q.k_n) v_n, sum_n q.k_n, and the number of keys; traced, what isn't used falls away."""
    return v.sum(-2, keepdim=True) + q @ (k.mT @ v), q @ k.sum(-2)[..., None], k.shape[-2]


def _causal_sums(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same over n <= i."""
    scores = (q @ k.mT).tril()
    visible = torch.ones_like(scores[0, 0]).tril()
    return (visible + scores) @ v, scores.sum(-1, keepdim=True), visible.sum(-1, keepdim=True)


def _floored(denominator: Tensor) -> Tensor:
    """Eq. 4's denominator, kept `EQ4_FLOOR` from zero with its sign."""
    floor = torch.where(denominator < 0, -EQ4_FLOOR, EQ4_FLOOR).to(denominator.dtype)
    return torch.where(denominator.abs() < EQ4_FLOOR, floor, denominator)


DECOMPOSITIONS = {torch.ops.clip_la.linear_attention.default: plain_linear_attention}
"""For `torch.export.ExportedProgram.run_decompositions`."""
