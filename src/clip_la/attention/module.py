"""LinearAttention: linear attention in place of `nn.MultiheadAttention`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from clip_la.attention.op import linear_attention
from clip_la.attention.spec import AttentionSpec

_RMS_EPS = 1e-6


class LinearAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` (batch first) whose heads attend by Eq. 4 or Eq. 7 of arXiv 2604.10064.

    Parameters, their initialisation and the state-dict keys are those of `nn.MultiheadAttention`, so weight
    casting, weight-decay rules and checkpoints written for it work. A learned gain adds one parameter,
    `gain` (num_heads,).

    Args:
        embed_dim, num_heads, bias, device, dtype: as in `nn.MultiheadAttention`.
        spec: the attention's kind and options; kind "softmax" is refused.
        causal: token i attends to tokens 0..i. Decided here: a call needs no mask, and the causal mask that
            it may be handed is only recognised.

    Raises:
        ValueError: the spec is a softmax one.
    """

    causal: bool
    spec: AttentionSpec

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
        super().__init__(embed_dim, num_heads, bias=bias, batch_first=True, device=device, dtype=dtype)
        self._set_up(spec, causal)

    @classmethod
    def from_softmax(cls, mha: nn.MultiheadAttention, spec: AttentionSpec, causal: bool) -> LinearAttention:
        """A LinearAttention that adopts the Parameter objects of `mha`; draws no random numbers.

        Raises:
            ValueError: `mha` has something that linear attention lacks (dropout, bias_k, kdim, ...).
        """
        _check_adoptable(mha)
        adopted = cls.__new__(cls)
        nn.Module.__init__(adopted)
        adopted.__dict__.update({name: value for name, value in mha.__dict__.items() if name[0] != "_"})
        adopted._parameters = dict(mha._parameters)
        adopted._modules = dict(mha._modules)
        adopted.training = mha.training
        adopted.batch_first = True
        adopted._qkv_same_embed_dim = True
        adopted._set_up(spec, causal)
        return adopted

    def _set_up(self, spec: AttentionSpec, causal: bool) -> None:
        if spec.kind == "softmax":
            raise ValueError(
                "LinearAttention was given a softmax spec; use nn.MultiheadAttention for softmax"
            )
        self.spec = spec
        self.causal = causal
        self.register_parameter("gain", None)
        if spec.gain == "learned":
            weight = self.in_proj_weight
            start = math.sqrt(self.head_dim)
            self.gain = nn.Parameter(
                torch.full((self.num_heads,), start, device=weight.device, dtype=weight.dtype)
            )

    def forward(  # type: ignore[override]
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
            attn_mask: None, or, in a causal module, the causal mask.
            need_weights: must be False: there are no attention weights to return.

        Raises:
            ValueError: a mask other than these, or weights asked for.
        """
        if need_weights:
            raise ValueError("linear attention has no weights to return; call with need_weights=False")
        self._check_mask(attn_mask, is_causal)
        q, k, v = self._project(query, key, value)
        out = linear_attention(
            q,
            k,
            v,
            kind=self.spec.kind,
            causal=self.causal,
            scale=None if self.spec.scale == "none" else self.spec.scale,
            gain=self._gain(),
            key_padding_mask=key_padding_mask,
            normalise_qk=self.spec.normalise_qk,
        )
        if self.spec.output_norm == "rms":
            out = F.rms_norm(out, out.shape[-1:], eps=_RMS_EPS)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None

    def _gain(self) -> float | Tensor | None:
        if self.spec.gain == "none":
            return None
        return self.gain if self.gain is not None else float(self.spec.gain)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The in-projection, split in heads: q (B, H, N, D), k and v (B, H, M, D)."""
        if query is key and key is value:
            packed = F.linear(query, self.in_proj_weight, self.in_proj_bias)
            q, k, v = packed.unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        else:
            weights = self.in_proj_weight.chunk(3)
            biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            q, k, v = (
                F.linear(x, weight, bias).unflatten(-1, (self.num_heads, self.head_dim))
                for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
            )
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _check_mask(self, attn_mask: Tensor | None, is_causal: bool) -> None:
        if not self.causal and (attn_mask is not None or is_causal):
            raise ValueError(
                "this LinearAttention was built with causal=False and was given an attention mask; linear "
                "attention supports causal masks (build with causal=True) and key_padding_mask only"
            )
        if attn_mask is not None and not torch.compiler.is_compiling():
            _require_causal(attn_mask)


_CAUSAL_MASKS: Any = WeakTensorKeyDictionary()


def _require_causal(mask: Tensor) -> None:
    """Read `mask` once in its life and refuse it unless it is the causal one."""
    if _CAUSAL_MASKS.get(mask) == mask._version:
        return
    future = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    expected = future if mask.dtype == torch.bool else torch.zeros_like(mask).masked_fill(future, -math.inf)
    if mask.ndim != 2 or not torch.equal(mask, expected):
        raise ValueError("attn_mask is not the causal mask")
    _CAUSAL_MASKS[mask] = mask._version


def _check_adoptable(mha: nn.MultiheadAttention) -> None:
    if mha.dropout > 0:
        raise ValueError(f"attention dropout is {mha.dropout}; linear attention has none, expected 0")
    if not mha._qkv_same_embed_dim:
        raise ValueError("nn.MultiheadAttention with kdim or vdim of their own can't become linear attention")
    if mha.bias_k is not None or mha.add_zero_attn:
        raise ValueError("nn.MultiheadAttention with bias_k/bias_v or add_zero_attn can't become linear")
