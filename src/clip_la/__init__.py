"""clip_la: linear attention for both towers of OpenCLIP models. Importing it registers the plugin."""

from clip_la.attention.module import LinearAttention
from clip_la.attention.op import linear_attention
from clip_la.attention.spec import AttentionSpec
from clip_la.openclip import list_linear_models, load_softmax_weights, register
from clip_la.version import __version__

__all__ = [
    "AttentionSpec",
    "LinearAttention",
    "__version__",
    "linear_attention",
    "list_linear_models",
    "load_softmax_weights",
    "register",
]
