"""How the configs of runs differ, and what their configs can't tell."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clip_la.report.runs import Run
from clip_la.report.text import setting

ABSENT = "(not recorded)"
"""Stands for the value of a key that a run's config does not have."""

EXPECTED_KEYS = ("model", "attention")
"""What runs are compared over; a difference in these is no warning."""

DATA_KEYS = (
    "train_data",
    "train_num_samples",
    "dataset_type",
    "dataset_resampled",
    "train_data_upsampling_factors",
    "empty_caption",
    "aug_cfg",
    "zeroshot",
    "classnames",
    "templates",
    "val_data",
    "val_num_samples",
)

EVALUATION_KEYS = (
    "num_images",
    "num_classes",
    "class_list_hash",
    "templates_hash",
    "num_pairs",
    "num_negatives",
)

_MAX_NAMES = 3

HOUSEKEEPING_KEYS = (
    "name",
    "logs",
    "resume",
    "workers",
    "save_frequency",
    "save_every_samples",
    "save_every_minutes",
    "keep_last",
    "log_every_n_steps",
    "log_level",
    "report_to",
    "wandb_project_name",
    "wandb_notes",
    "dist_timeout_minutes",
    "read_retries",
    "read_timeout_seconds",
    "val_frequency",
    "zeroshot_frequency",
    "diagnostics",
    "diagnostics_frequency",
)
"""Settings that can't change what is learned; their differences are listed without a warning."""


@dataclass(frozen=True)
class ConfigDifference:
    """`differs`: key -> run name -> value, `ABSENT` where a run lacks the key; `equal`: key -> value.

    The versions of the software that each run recorded are among the keys, as `versions.NAME`.
    `unknown`: what equal settings can't tell, in sentences.
    """

    differs: dict[str, dict[str, Any]]
    equal: dict[str, Any]
    unknown: tuple[str, ...]


def config_difference(runs: Sequence[Run]) -> ConfigDifference:
    """Which config keys and software versions differ between runs, and which are equal."""
    configs = {run.name: {**run.config, **_versions(run)} for run in runs}
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    differs, equal = {}, {}
    for key in keys:
        values = {name: config.get(key, ABSENT) for name, config in configs.items()}
        if len({fingerprint(value) for value in values.values()}) > 1:
            differs[key] = values
        else:
            equal[key] = next(iter(values.values()))
    return ConfigDifference(differs, equal, tuple(_unknown(runs, differs, equal)))


def _versions(run: Run) -> dict[str, Any]:
    versions = run.start.get("versions")
    return {f"versions.{key}": value for key, value in versions.items()} if isinstance(versions, dict) else {}


def fingerprint(value: Any) -> str:
    """Equal for equal values."""
    return json.dumps(value, sort_keys=True, default=str)


def _unknown(
    runs: Sequence[Run], differs: Mapping[str, Mapping[str, Any]], equal: Mapping[str, Any]
) -> Iterator[str]:
    paths = [key for key in ("train_data", "val_data", "zeroshot") if isinstance(equal.get(key), str)]
    if paths and len(runs) > 1:
        yield f"Whether the equal paths of {', '.join(paths)} held equal files when each run read them."
    yield "Whether the code was changed without a new version."
    half = [key for key, values in differs.items() if ABSENT in values.values()]
    if half:
        yield f"What runs that did not record it had for {', '.join(half)}."
    machines = [run.name for run in runs if "device" not in run.start]
    if machines:
        yield f"On what device {', '.join(machines)} ran."
    elif len(runs) > 1:
        yield "Whether equal devices were of one make, and what else ran on them; hours depend on it."


def odd_ones(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The names whose value is not the most frequent one; all where none is more frequent than the others."""
    names: dict[str, list[str]] = {}
    for name, value in values.items():
        names.setdefault(fingerprint(value), []).append(name)
    sizes = sorted(map(len, names.values()))
    if len(sizes) < 2:
        return ()
    most = sizes[-1] if sizes[-1] > sizes[-2] else math.inf
    return tuple(name for group in names.values() if len(group) != most for name in group)


def groups(values: Mapping[str, Any]) -> str:
    """ "128 (a, b); 256 (c)": each value once, with the runs that have it."""
    names: dict[str, list[str]] = {}
    for name, value in values.items():
        names.setdefault("unknown" if value is None else setting(value), []).append(name)
    return "; ".join(f"{value} ({_some(group)})" for value, group in names.items())


def _some(names: Sequence[str]) -> str:
    shown = (
        names
        if len(names) <= _MAX_NAMES
        else [*names[: _MAX_NAMES - 1], f"{len(names) - _MAX_NAMES + 1} more"]
    )
    return ", ".join(shown)
