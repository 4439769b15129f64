"""The `evaluators` of a run's config: what is read, and what is refused with what advice."""

from __future__ import annotations

from typing import Any

import pytest

from clip_la.evaluate.spec import EvaluatorSpec, read_specs

ZERO_SHOT = {"kind": "zeroshot", "data": "tree"}


def test_settings_are_read() -> None:
    spec, other = read_specs(
        [
            {**ZERO_SHOT, "name": "mine", "every-samples": 1e3, "numeric_labels": True, "templates": None},
            {"kind": "validation", "data": "x.tar", "every_epochs": 0, "block_size": 32},
        ]
    )
    assert spec == EvaluatorSpec("zeroshot", "tree", "mine", every_samples=1000, numeric_labels=True)
    assert other == EvaluatorSpec("validation", "x.tar", every_epochs=0, block_size=32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("tree", "found 'tree'; expected settings such as kind: zeroshot"),
        ({"data": "tree"}, "kind is missing"),
        ({"kind": "zeroshot"}, "data is missing"),
        ({"kind": "accuracy", "data": "x"}, "kind is 'accuracy'; expected one of zeroshot, retrieval"),
        ({**ZERO_SHOT, "clasnames": "x"}, "unknown setting clasnames; did you mean classnames"),
        ({**ZERO_SHOT, "block_size": 8}, "block_size is a setting of validation, not of zeroshot"),
        (
            {**ZERO_SHOT, "every_epochs": 1, "every_samples": 2},
            "every_epochs and every_samples exclude each other",
        ),
        ({**ZERO_SHOT, "every_samples": 0}, "every_samples is 0; expected at least 1"),
        ({**ZERO_SHOT, "every_epochs": -1}, "every_epochs is -1; expected at least 0"),
        ({**ZERO_SHOT, "every_samples": 1.5}, "every_samples is 1.5; expected a whole number"),
        ({**ZERO_SHOT, "every_samples": True}, "every_samples is True; expected a whole number"),
        ({**ZERO_SHOT, "numeric_labels": "yes"}, "numeric_labels is 'yes'; expected true or false"),
        ({**ZERO_SHOT, "numeric_labels": None}, "numeric_labels is None; expected true or false"),
        ({"kind": "retrieval", "data": 7}, "data is 7; expected a text"),
        ({"kind": "validation", "data": "x", "block_size": 1}, "block_size is 1; expected at least 2"),
    ],
)
def test_what_is_wrong_is_said_with_its_entry(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"evaluators, entry 2: {message}"):
        read_specs([ZERO_SHOT, settings])
