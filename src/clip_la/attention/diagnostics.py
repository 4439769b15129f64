"""What shows over-smoothing: how much of an attention layer's output depends on the query, in numbers.

The weights W (N x M, a head) of every kind are those of `reference`, with values that are the unit vectors:
softmax's, Eq. 4's after its division, Eq. 7's scale * (1 + gain * q^.k^), less their mean over n where
values are centred. Layout and names as there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clip_la.attention.module import LinearAttention
from clip_la.attention.reference import eq4_attention, eq7_attention, softmax_attention

MAX_QUERIES = 256
"""Of longer sequences, so many evenly spaced rows of W are looked at: its singular values cost N^3."""

_Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@torch.no_grad()
def measure_weights(attention: nn.MultiheadAttention, x: Tensor, *, causal: bool) -> dict[str, float]:
    """How a layer attends in the tokens x (B, N, embed_dim), float32; means over B and heads.

    Args:
        attention: softmax's `nn.MultiheadAttention` or a `LinearAttention`, called with query = key = value.
        causal: whether token i attends to tokens 0..i only.

    Returns:
        `query_to_constant`: |o - c| / |c|, Frobenius norms over all tokens and heads, c being the output for
        q = 0, which no query changes: the sum z in Eq. 7 (so |g Q^ S| / |z|), the mean of the values else;
        NaN where values are centred, which leaves no such part.
        `entropy`: of a row of |W|, divided by the log of the number of tokens that it sees: 1 if uniform.
        `effective_rank`: exp of the entropy of the singular values of W, rows scaled to sum |W| = 1
        (Roy and Vetterli 2007): 1 if all queries attend alike and nothing is masked. A causal W has a high
        one however it attends.
        NaN where the layer's numbers are not finite.
    """
    q, k, v = _project(attention, x)
    attend = _dense_attention(attention, causal)
    rows = _rows(x.shape[1], x.device)
    if not causal:  # a causal row is known by its place among all
        q = q[..., rows, :]
    weights = attend(q, k, torch.eye(k.shape[-2], dtype=x.dtype, device=x.device))
    return {
        "query_to_constant": _query_to_constant(attend, q, k, v) if _has_constant(attention) else torch.nan,
        **_shape_of(weights[..., rows, :] if causal else weights, rows + 1 if causal else None),
    }


def _project(attention: nn.MultiheadAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    bias = attention.in_proj_bias
    packed = F.linear(x, attention.in_proj_weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    heads = torch.unflatten(packed, -1, (3, attention.num_heads, attention.head_dim))
    q, k, v = heads.permute(2, 0, 3, 1, 4)
    return q, k, v


def _dense_attention(attention: nn.MultiheadAttention, causal: bool) -> _Attention:
    if not isinstance(attention, LinearAttention):
        return partial(softmax_attention, causal=causal)
    spec = attention.spec
    if spec.kind == "eq4":
        return partial(eq4_attention, causal=causal, normalise_qk=spec.normalise_qk)
    fixed_gain = None if isinstance(spec.gain, str) else spec.gain
    return partial(
        eq7_attention,
        causal=causal,
        scale=None if spec.scale == "none" else spec.scale,
        gain=fixed_gain if attention.gain is None else attention.gain,
        centre_values=spec.centre_values and not causal,
    )


def _has_constant(attention: nn.MultiheadAttention) -> bool:
    return not isinstance(attention, LinearAttention) or attention.causal or not attention.spec.centre_values


def _rows(num_tokens: int, device: torch.device) -> Tensor:
    return torch.linspace(0, num_tokens - 1, min(num_tokens, MAX_QUERIES), device=device).round().long()


def _query_to_constant(attend: _Attention, q: Tensor, k: Tensor, v: Tensor) -> float:
    constant = attend(torch.zeros_like(q), k, v)
    return float((attend(q, k, v) - constant).norm() / constant.norm())


def _shape_of(weights: Tensor, num_visible: Tensor | None) -> dict[str, float]:
    """Entropy and effective rank; `num_visible` (N,): the keys that each row sees, None for all."""
    if not weights.isfinite().all():
        return {"entropy": torch.nan, "effective_rank": torch.nan}
    weights = weights / weights.abs().sum(-1, keepdim=True)
    entropies = torch.special.entr(weights.abs()).sum(-1)
    if num_visible is None:
        num_visible = torch.full(weights.shape[-2:-1], weights.shape[-1], device=weights.device)
    has_choice = num_visible > 1
    relative = entropies[..., has_choice] / num_visible[has_choice].log()
    singular = torch.linalg.svdvals(weights.cpu())
    singular = singular / singular.sum(-1, keepdim=True)
    rank = torch.special.entr(singular).sum(-1).exp()
    return {"entropy": relative.mean().item(), "effective_rank": rank.mean().item()}
