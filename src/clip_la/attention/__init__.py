"""Linear attention on its own: needs torch and nothing else of this package."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
_MODULES = {
    "AttentionSpec": "spec",
    "LinearAttention": "module",
    "explain_choice": "dispatch",
    "linear_attention": "op",
    "packed_linear_attention": "op",
    "which": "dispatch",
    "why_not": "dispatch",
}


def __getattr__(name: str) -> Any:
    """A public name, imported at its first use: configs and reports read a spec without waiting for torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
