"""What a classification found, and how people read it in a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Prediction:
    """One picture's answer.

    Attributes:
        probabilities: in the order of the labels; empty where the picture could not be read.
        error: why not.
        thumbnail: a small JPEG in base64, where it is wanted.
    """

    path: str
    probabilities: tuple[float, ...] = ()
    error: str = ""
    thumbnail: str = ""

    def top(self, labels: Sequence[str], count: int | None = None) -> list[tuple[str, float]]:
        """The most probable labels, best first; of equal ones the first."""
        pairs = zip(labels, self.probabilities, strict=True)
        return sorted(pairs, key=lambda pair: -pair[1])[:count]


@dataclass(frozen=True)
class Classification:
    """All answers.

    Attributes:
        exclusive: probabilities of a picture add up to 1; a SigLIP model judges each label by itself.
    """

    model: str
    attention: str
    templates: str
    labels: tuple[str, ...]
    exclusive: bool
    predictions: tuple[Prediction, ...]

    @property
    def unreadable(self) -> tuple[Prediction, ...]:
        """The pictures that have an error in place of an answer."""
        return tuple(prediction for prediction in self.predictions if prediction.error)

    @property
    def readable(self) -> tuple[Prediction, ...]:
        """The pictures that have an answer."""
        return tuple(prediction for prediction in self.predictions if not prediction.error)

    def counts(self) -> Counter[str]:
        """How many pictures have each label as their most probable one."""
        return Counter(prediction.top(self.labels, 1)[0][0] for prediction in self.readable)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe, without thumbnails."""
        images = [
            {"path": item.path, "error": item.error}
            if item.error
            else {"path": item.path, "probabilities": dict(zip(self.labels, item.probabilities, strict=True))}
            for item in self.predictions
        ]
        fields = ("model", "attention", "templates", "labels", "exclusive")
        return {**{name: getattr(self, name) for name in fields}, "images": images}


def format_classification(result: Classification, top: int) -> str:
    """For people: a block a picture, best label first."""
    width = max(map(len, result.labels))
    lines = []
    for prediction in result.predictions:
        lines.append(prediction.path)
        if prediction.error:
            lines.append(f"  not readable: {prediction.error}")
        for label, probability in prediction.top(result.labels, top) if not prediction.error else ():
            lines.append(
                f"  {label:<{width}}  {100 * probability:5.1f} %  {'#' * round(30 * probability)}".rstrip()
            )
    if len(result.readable) > 1:
        counts = ", ".join(f"{count} {label}" for label, count in result.counts().most_common())
        lines.append(f"{len(result.readable)} pictures: {counts}")
    return "\n".join(lines)
