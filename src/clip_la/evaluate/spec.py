"""One evaluation of a training run, as its config lists it under `evaluators`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS: Mapping[str, frozenset[str]] = {
    "zeroshot": frozenset(
        {"classnames", "templates", "numeric_labels", "allow_missing_classes", "allow_unknown_folders"}
    ),
    "retrieval": frozenset({"images", "split"}),
    "validation": frozenset({"block_size", "num_samples"}),
}
"""Kinds of evaluation, and the settings that each has beside those of all."""


@dataclass(frozen=True)
class EvaluatorSpec:
    """What is evaluated, on what, and how often.

    Attributes:
        kind: zeroshot (`ZeroShot`), retrieval (`CaptionRetrieval`) or validation (`ValidationLoss`); the
            settings that aren't named here are theirs.
        data: a tree, shards, or a file, as the kind takes it.
        name: under which it is logged; by default the kind with the data's name.
        every_epochs: (virtual) epochs between evaluations; 0 for the end of the run only.
        every_samples: global samples between evaluations, in place of `every_epochs`.
        batch_size: images a batch, a rank; by default 64, and the run's for a validation loss.
    """

    kind: str
    data: str
    name: str | None = None
    every_epochs: int | None = None
    every_samples: int | None = None
    batch_size: int | None = None
    classnames: str | None = None
    templates: str | None = None
    numeric_labels: bool = False
    allow_missing_classes: bool = False
    allow_unknown_folders: bool = False
    images: str | None = None
    split: str = "test"
    block_size: int = 256
    num_samples: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; expected one of {', '.join(KINDS)}")
        if self.every_epochs is not None and self.every_samples is not None:
            raise ValueError("every_epochs and every_samples exclude each other; give the one you mean")
        _check_at_least(self, 1, "every_samples", "batch_size", "num_samples")
        _check_at_least(self, 0, "every_epochs")
        _check_at_least(self, 2, "block_size")

    @classmethod
    def from_config(cls, settings: Mapping[str, Any]) -> EvaluatorSpec:
        """Read one entry of a config.

        Raises:
            ValueError: a setting that there isn't (near ones are named), that the kind doesn't have, or of
                another type.
        """
        if not isinstance(settings, Mapping):
            raise ValueError(f"found {settings!r}; expected settings such as kind: zeroshot, data: DIR")
        given = {str(name).replace("-", "_"): value for name, value in settings.items()}
        for required in ("kind", "data"):
            if given.get(required) is None:
                raise ValueError(f"{required} is missing")
        checked = {name: _checked_setting(name, value, str(given["kind"])) for name, value in given.items()}
        return cls(**checked)


def read_specs(entries: Sequence[Mapping[str, Any]]) -> tuple[EvaluatorSpec, ...]:
    """The entries of a config.

    Raises:
        ValueError: see `EvaluatorSpec.from_config`; the message says which entry.
    """
    specs = []
    for number, entry in enumerate(entries, start=1):
        try:
            specs.append(EvaluatorSpec.from_config(entry))
        except ValueError as error:
            raise ValueError(f"evaluators, entry {number}: {error}") from error
    return tuple(specs)


_TYPES = {entry.name: str(entry.type) for entry in dataclasses.fields(EvaluatorSpec)}
_EXPECTED = {"str": "a text", "int": "a whole number", "bool": "true or false"}


def _checked_setting(name: str, value: Any, kind: str) -> Any:
    if name not in _TYPES:
        near = difflib.get_close_matches(name, _TYPES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"expected some of {', '.join(_TYPES)}"
        raise ValueError(f"unknown setting {name}; {hint}")
    owners = [owner for owner, names in KINDS.items() if name in names]
    if kind in KINDS and owners and kind not in owners:
        raise ValueError(f"{name} is a setting of {owners[0]}, not of {kind}")
    expected, _, optional = _TYPES[name].partition(" | ")
    if expected == "int" and isinstance(value, float) and value.is_integer():
        return int(value)  # 1e6 is what people write for a million
    if type(value).__name__ != expected and not (value is None and optional):
        raise ValueError(f"{name} is {value!r}; expected {_EXPECTED[expected]}")
    return value


def _check_at_least(spec: EvaluatorSpec, least: int, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}; expected at least {least}")
