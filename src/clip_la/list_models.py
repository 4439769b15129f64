"""`clip-la models`: what this package adds to OpenCLIP's models."""

from __future__ import annotations

import argparse

from clip_la.attention.spec import AttentionSpec
from clip_la.bundle import resolve_model_config
from clip_la.openclip import list_linear_models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    for name in list_linear_models():
        config = resolve_model_config(name)
        print(f"{name:<20} attention {AttentionSpec.from_config(config.get('attention'))}")
    return 0
