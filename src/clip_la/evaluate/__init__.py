"""Evaluators: each is run(bundle) -> metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from clip_la.bundle import ClipBundle


class Evaluator(Protocol):
    """What the training loop and `clip-la eval` know of an evaluation."""

    @property
    def name(self) -> str:
        """Under which the metrics are logged, such as "zeroshot/emoji"."""
        ...

    def run(self, bundle: ClipBundle) -> dict[str, Any]:
        """Evaluate on every rank of `torch.distributed` together; all get the same metrics.

        Returns:
            A flat dict of JSON values. Leaves the model's mode and weights as they were.
        """
        ...
