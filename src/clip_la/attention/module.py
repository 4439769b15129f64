"""LinearAttention: Eq. 4 or Eq. 7 in place of `nn.MultiheadAttention`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clip_la.attention.masks import require_causal
from clip_la.attention.op import linear_attention, packed_linear_attention
from clip_la.attention.spec import AttentionSpec

RMS_EPS = 1e-6
"""Added to the mean square of a head's output in `output_norm: rms`."""


class LinearAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` (batch first) whose heads attend by Eq. 4 or Eq. 7 of arXiv 2604.10064.

    Parameters, their initialisation and the state-dict keys are those of `nn.MultiheadAttention`, so weight
    casting, weight-decay rules and checkpoints written for it work. A learned gain is one parameter more,
    `gain` (num_heads,).

    Args:
        embed_dim, num_heads, bias, device, dtype: as in `nn.MultiheadAttention`.
        spec: the kind of attention and its options.
        causal: token i attends to tokens 0..i. This is decided here: calls need no mask, and the causal mask
            that they may hand over is only recognised.

    Raises:
        ValueError: a softmax spec.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        spec: AttentionSpec,
        causal: bool,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if spec.kind == "softmax":
            raise ValueError(
                "LinearAttention was given a softmax spec; use nn.MultiheadAttention for softmax"
            )
        super().__init__(embed_dim, num_heads, bias=bias, batch_first=True, device=device, dtype=dtype)
        self.spec = spec
        self.causal = causal
        # Else nn.TransformerEncoderLayer would hand our weights to its fused softmax inference.
        self._qkv_same_embed_dim = False
        self.gain = self._initial_gain() if spec.gain == "learned" else None

    @classmethod
    def from_softmax(cls, mha: nn.MultiheadAttention, spec: AttentionSpec, causal: bool) -> LinearAttention:
        """A LinearAttention that adopts the Parameter objects of `mha`; no random number is drawn.

        Raises:
            ValueError: `mha` has something that linear attention lacks (dropout, kdim, bias_k, ...).
        """
        _check_adoptable(mha)
        adopted = cls(
            mha.embed_dim,
            mha.num_heads,
            spec=spec,
            causal=causal,
            bias=mha.in_proj_bias is not None,
            device="meta",
        )
        adopted.in_proj_weight, adopted.in_proj_bias = mha.in_proj_weight, mha.in_proj_bias
        adopted.out_proj = mha.out_proj
        if adopted.gain is not None:
            adopted.gain = adopted._initial_gain()
        return adopted.train(mha.training)

    def _initial_gain(self) -> nn.Parameter:
        weight = self.in_proj_weight
        return nn.Parameter(weight.new_full((self.num_heads,), math.sqrt(self.head_dim)))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attention of query (B, N, embed_dim) to key and value (B, M, embed_dim): ((B, N, embed_dim), None).

        Args:
            key_padding_mask: bool (B, M), True where a key is to be ignored.
            need_weights: must be False: there are no attention weights to return.
            attn_mask: None or, if this module is causal, the causal mask (`masks.require_causal`).
            average_attn_weights: has no meaning here.
            is_causal: may be True only if this module is causal. False leaves a causal module causal.

        Raises:
            ValueError: any other mask, weights asked for, or unbatched inputs.
        """
        self._check_call(query, key, value, need_weights, attn_mask, is_causal)
        options: dict[str, Any] = {
            "kind": self.spec.kind,
            "causal": self.causal,
            "scale": None if self.spec.scale == "none" else self.spec.scale,
            "gain": self._gain(),
            "key_padding_mask": key_padding_mask,
            "normalise_qk": self.spec.normalise_qk,
            "centre_values": self.spec.centre_values and not self.causal,
        }
        if query is key and key is value:
            out = packed_linear_attention(self._project_packed(query), **options)
        else:
            out = linear_attention(*self._project(query, key, value), **options)
        if self.spec.output_norm == "rms":
            out = F.rms_norm(out, out.shape[-1:], eps=RMS_EPS)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None

    def extra_repr(self) -> str:
        """What `print(model)` shows of this layer."""
        return f"{self.embed_dim}, num_heads={self.num_heads}, spec={self.spec}, causal={self.causal}"

    def _gain(self) -> float | Tensor | None:
        if self.gain is not None:
            return self.gain
        return None if self.spec.gain == "none" else float(self.spec.gain)

    def _project_packed(self, x: Tensor) -> Tensor:
        """q, k and v of the same tokens in one product: (B, N, 3, H, D)."""
        packed = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        return torch.unflatten(packed, -1, (3, self.num_heads, self.head_dim))

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Tensor]:
        """q (B, H, N, D), k and v (B, H, M, D)."""
        weights = self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
            projected = F.linear(x, weight, bias)
            yield torch.unflatten(projected, -1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _check_call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        need_weights: bool,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> None:
        if not query.ndim == key.ndim == value.ndim == 3:
            raise ValueError(
                f"query, key and value have {query.ndim}, {key.ndim} and {value.ndim} dimensions; expected "
                "(batch, tokens, embed_dim) each (unsqueeze a single sequence)"
            )
        if need_weights:
            raise ValueError("linear attention has no attention weights to return; pass need_weights=False")
        if not self.causal and (attn_mask is not None or is_causal):
            raise ValueError(
                "this LinearAttention was built with causal=False and was given an attention mask; causal "
                "order is chosen by causal=True when building it, padding by key_padding_mask, and no other "
                "mask is possible"
            )
        if attn_mask is not None:
            require_causal(attn_mask, query.shape[1])


def _check_adoptable(mha: nn.MultiheadAttention) -> None:
    problem = None
    if mha.dropout > 0:
        problem = f"attention dropout {mha.dropout}, but there are no attention weights to drop"
    elif (mha.kdim, mha.vdim) != (mha.embed_dim, mha.embed_dim):
        problem = f"kdim {mha.kdim} and vdim {mha.vdim} other than embed_dim {mha.embed_dim}"
    elif mha.bias_k is not None or mha.bias_v is not None or mha.add_zero_attn:
        problem = "bias_k and bias_v, or add_zero_attn"
    elif not mha.batch_first:
        problem = "batch_first=False; LinearAttention takes (batch, tokens, embed_dim) only"
    if problem is not None:
        raise ValueError(f"nn.MultiheadAttention can't become linear attention: it has {problem}")
