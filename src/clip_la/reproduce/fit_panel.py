"""The scaling law: held-out loss over model size for each kind of attention, fitted by `clip-la fit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clip_la.report import write_fit
from clip_la.report.fit import PowerLaw
from clip_la.report.scaling import Scaling
from clip_la.report.summary import nan_to_none
from clip_la.report.text import count
from clip_la.reproduce.convergence_panel import VALIDATION
from clip_la.reproduce.panel import Panel, Table
from clip_la.reproduce.verdicts import Claim, exponent_claim, level_claim


def fit_panel(folders: Sequence[Path], facts: Mapping[str, str], folder: Path) -> Panel:
    """Fit, draw and judge.

    Args:
        folders: runs of several sizes and kinds of attention, softmax among them.
        facts: on what they rest.
        folder: for scaling.png, .svg, .csv and .json.
    """
    scaling = write_fit(folders, folder, loss=VALIDATION).scaling
    return Panel(
        name="fit",
        title="Scaling law",
        facts=facts,
        claims=_claims(scaling),
        figures={"Held-out loss over parameters of the image tower, L(N) = a N^-b": folder / "scaling.svg"},
        tables=[_laws(scaling), _points(scaling)],
        limits=scaling.limits,
        numbers=_numbers(scaling),
    )


def _claims(scaling: Scaling) -> list[Claim]:
    claims = []
    for (first, second), found in scaling.comparisons.items():
        if first == "softmax":
            laws = scaling.laws[second], scaling.laws[first]
            claims += [exponent_claim(second, first, laws, found), level_claim(second, first, found)]
    return claims


def _laws(scaling: Scaling) -> Table:
    return Table(
        "L(N) = a N^-b [95 %, bootstrap]. In the paper: 593 N^-0.362 (softmax), 376 N^-0.332 (linear)",
        ["Attention", "a", "b", "Sizes", "Runs", "Largest error"],
        [
            [
                label,
                f"{law.a:.3g} [{law.a_interval[0]:.3g}, {law.a_interval[1]:.3g}]",
                f"{law.b:.3f} [{law.b_interval[0]:.3f}, {law.b_interval[1]:.3f}]",
                str(law.num_sizes),
                str(law.num_points),
                f"{law.max_error:.1%}",
            ]
            for label, law in scaling.laws.items()
        ],
    )


def _points(scaling: Scaling) -> Table:
    """A row a size, a column a kind; seeds side by side."""
    kinds = list(dict.fromkeys(point.attention for point in scaling.points))
    sizes = sorted({_rounded(point.parameters[scaling.parameters]) for point in scaling.points})
    losses = {(size, kind): "-" for size in sizes for kind in kinds}
    for point in scaling.points:
        key = _rounded(point.parameters[scaling.parameters]), point.attention
        losses[key] = f"{losses[key]}, {point.loss:.3f}".removeprefix("-, ")
    return Table(
        "Held-out losses",
        ["Parameters of the image tower", *kinds],
        [[count(size), *(losses[size, kind] for kind in kinds)] for size in sizes],
    )


def _rounded(num_parameters: int) -> float:
    """A size to three digits: learned gains add a few numbers to a model of the same size."""
    return float(f"{num_parameters:.3g}")


def _numbers(scaling: Scaling) -> dict[str, Any]:
    numbers: dict[str, Any] = nan_to_none(
        {
            "points": [asdict(point) for point in scaling.points],
            "laws": {label: _law(law) for label, law in scaling.laws.items()},
            "comparisons": [
                {"first": first, "second": second, **asdict(found)}
                for (first, second), found in scaling.comparisons.items()
            ],
        }
    )
    return numbers


def _law(law: PowerLaw) -> dict[str, Any]:
    return {name: value for name, value in vars(law).items() if name != "draws"}
