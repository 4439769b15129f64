"""`clip-la train`: a config file and flags to a run."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from clip_la.config_sources import add_flags, flags_given, load_run_config, refuse_unknown_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command: `--config`, and one a field of `RunConfig`."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file; `base: OTHER.yaml` in it inherits"
    )
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    refuse_unknown_flags(args.rest)
    config = load_run_config(args.config, flags_given(args))
    logging.getLogger("clip_la").setLevel(config.log_level.upper())
    from clip_la.train.loop import train  # after the settings are known to be right: it takes seconds

    return train(config)
