"""What every backend of the operator computes: options, what forward returns and keeps, gradients.

Names used throughout: B batch, H heads, N queries, M keys, D size of a row of q and k, E of v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 128
"""Tokens in a causal tile; up to about this length one quadratic tile is faster than a carried state."""


@dataclass(frozen=True)
class Options:
    """One of the two equations and its options.

    Attributes:
        kind: "eq7" or "eq4".
        causal: query i sees the keys 0..i.
        scale: Eq. 7's factor; None for 1/M, so that no length becomes a constant of a traced graph.
        normalise: rows of q and k are divided by their norms (Eq. 7: always).
        centre_values: v less its mean over the keys takes the place of v; Eq. 7, not causal.
    """

    kind: str
    causal: bool
    scale: float | None
    normalise: bool
    centre_values: bool = False

    @property
    def has_denominator(self) -> bool:
        """Whether the output is divided by the sum of its weights."""
        return self.kind == "eq4"

    @property
    def keeps_key_sum(self) -> bool:
        """Whether backward needs the sum of the unit keys."""
        return not self.causal and (self.has_denominator or self.centre_values)


class Inputs(NamedTuple):
    """What attention is computed from.

    Attributes:
        q: (B, H, N, D).
        k: (B, H, M, D).
        v: (B, H, M, E).
        gain: (H,), or None for 1.
        num_keys: Eq. 4 with key padding: how many keys each query sees, (B, 1, N, 1); the padded rows of k
            and v are 0. None without padding, and in backward, which has the denominators instead.
        options: which equation.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gain: Tensor | None
    num_keys: Tensor | None
    options: Options

    @property
    def scale(self) -> float:
        """The constant factor of all weights."""
        if self.options.has_denominator:
            return 1.0
        return self.options.scale if self.options.scale is not None else 1.0 / self.mean_count

    @property
    def mean_count(self) -> int:
        """What a sum over the keys is divided by for their mean: M, or 1 without keys, whose sums are 0."""
        return max(self.k.shape[2], 1)

    def visible_keys(self) -> Tensor:
        """num_keys, whether or not there is padding: (B, 1, N, 1)."""
        if self.num_keys is not None:
            return self.num_keys
        B, _, N, _ = self.q.shape
        visible = torch.arange(1, N + 1, device=self.q.device)
        if not self.options.causal:
            visible = visible.new_full((N,), self.k.shape[2])
        return visible.to(accumulator(self.q.dtype))[:, None].expand(B, 1, N, 1)


class Forward(NamedTuple):
    """The output, and what backward needs beside q, k, v and gain.

    Attributes:
        out: (B, H, N, E) in the dtype of v, laid out as (B, N, H, E), so that merging the heads is free.
        state: S = sum_n k^_n v_n^T, (B, H, D, E), without gain and of v less its mean if this is to be
            centred; causal: (B, H, 0, E), it is summed again.
        key_sum: kappa = sum_n k^_n, (B, H, D, 1), unless `keeps_key_sum` is False: (B, H, D, 0).
        value_mean: the mean of v over the keys if it is to be centred, (B, H, 1, E), else (B, H, 0, E).
        q_norm, k_norm: |q_i| and |k_n|, (B, H, N, 1) and (B, H, M, 1); raw rows: (..., 0).
        denominator: Eq. 4's, before the floor, (B, H, N, 1); Eq. 7: (B, H, N, 0).
        exact_out: Eq. 4's output before rounding to bfloat16 or float16, (B, H, N, E); else (B, H, N, 0).

    All but out are float32, or float64 for float64 inputs.
    """

    out: Tensor
    state: Tensor
    key_sum: Tensor
    value_mean: Tensor
    q_norm: Tensor
    k_norm: Tensor
    denominator: Tensor
    exact_out: Tensor


class Gradients(NamedTuple):
    """Gradients in the dtypes of q, k, v and gain."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dgain: Tensor | None


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums over tokens of such inputs are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_forward(inputs: Inputs) -> Forward:
    """What a forward returns, not filled."""
    q, v, options = inputs.q, inputs.v, inputs.options
    B, H, N, D = q.shape
    M, E = v.shape[-2:]
    denominators = int(options.has_denominator)
    full = int(not options.causal)
    norms = int(options.normalise)
    rounded = options.has_denominator and v.dtype != accumulator(v.dtype)
    like = q.new_empty(0, dtype=accumulator(q.dtype))
    return Forward(
        out=v.new_empty(B, N, H, E).transpose(1, 2),
        state=like.new_empty(B, H, full * D, E),
        key_sum=like.new_empty(B, H, D, int(options.keeps_key_sum)),
        value_mean=like.new_empty(B, H, int(options.centre_values), E),
        q_norm=like.new_empty(B, H, N, norms),
        k_norm=like.new_empty(B, H, M, norms),
        denominator=like.new_empty(B, H, N, denominators),
        exact_out=like.new_empty(B, H, N, E if rounded else 0),
    )
