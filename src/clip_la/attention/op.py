"""linear_attention(): Eq. 4 and Eq. 7 of arXiv 2604.10064 in the layout of `scaled_dot_product_attention`."""

from __future__ import annotations

from torch import Tensor

from clip_la.attention.reference import eq4_attention, eq7_attention


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kind: str = "eq7",
    causal: bool = False,
    scale: str | float | None = None,
    gain: float | Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    normalise_qk: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Linear attention of q (B, H, N, D) to k (B, H, M, D) and v (B, H, M, E): (B, H, N, E)."""
    q, k = q.float(), k.float()
    if kind == "eq7":
        out = eq7_attention(
            q, k, v.float(), causal=causal, scale=scale, gain=gain, key_padding_mask=key_padding_mask
        )
        return out.to(v.dtype)
    if kind == "eq4":
        if scale is not None or gain is not None:
            raise ValueError("scale and gain belong to eq7; eq4 has a denominator of its own")
        out = eq4_attention(
            q, k, v.float(), causal=causal, key_padding_mask=key_padding_mask, normalise_qk=normalise_qk
        )
        return out.to(v.dtype)
    raise ValueError(f"kind is {kind!r}; expected eq4 or eq7")
