"""Linear attention on its own: needs torch and nothing else of this package."""

from clip_la.attention.dispatch import explain_choice, which, why_not
from clip_la.attention.module import LinearAttention
from clip_la.attention.op import linear_attention, packed_linear_attention
from clip_la.attention.spec import AttentionSpec

__all__ = [
    "AttentionSpec",
    "LinearAttention",
    "explain_choice",
    "linear_attention",
    "packed_linear_attention",
    "which",
    "why_not",
]
