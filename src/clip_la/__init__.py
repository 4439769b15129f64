"""clip_la: linear attention for both towers of OpenCLIP models."""

from clip_la.version import __version__

__all__ = ["__version__"]
