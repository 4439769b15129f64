"""clip_la: linear attention for both towers of OpenCLIP models.

Importing it registers the plugin: at once where OpenCLIP is loaded, else as soon as OpenCLIP is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from clip_la import attention, plugin
from clip_la.attention.spec import AttentionSpec
from clip_la.version import __version__

if TYPE_CHECKING:
    from clip_la.attention.module import LinearAttention
    from clip_la.attention.op import linear_attention
    from clip_la.openclip import list_linear_models, load_softmax_weights, register

__all__ = [
    "AttentionSpec",
    "LinearAttention",
    "__version__",
    "attention",
    "linear_attention",
    "list_linear_models",
    "load_softmax_weights",
    "register",
]
_MODULES = {
    "LinearAttention": "attention.module",
    "linear_attention": "attention.op",
    "list_linear_models": "openclip",
    "load_softmax_weights": "openclip",
    "register": "openclip",
}


def __getattr__(name: str) -> Any:
    """A public name, imported at its first use: OpenCLIP takes seconds, and not all commands need it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


plugin.register_with_openclip()
