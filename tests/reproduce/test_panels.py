"""Panels from stand-in runs and timings: what they show, what they say, and the page that holds them."""

from __future__ import annotations

import csv
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from finished_run import EQ4, EQ7, GAIN, SOFTMAX, scaling_runs, write_run

from clip_la.bench.sweep import Row
from clip_la.bench.write import write_rows
from clip_la.report.runs import RunError
from clip_la.reproduce.convergence_panel import convergence_panel, read_curves
from clip_la.reproduce.fit_panel import fit_panel
from clip_la.reproduce.panel import Panel
from clip_la.reproduce.time_panel import draw_time_panel
from clip_la.reproduce.write import text_of, write_panels

FACTS = {"Data": "3 <pairs> & more", "Seeds": "0, 1"}


def verdicts(panel: Panel) -> dict[str, str]:
    return {claim.paper: claim.verdict for claim in panel.claims}


@pytest.fixture
def time(tmp_path: Path) -> Panel:
    """Softmax quadratic up to 16,384 tokens, the linear ones linear."""
    rows = [
        Row("operator", subject, passes, "float32", False, 1, N, *[seconds * (N / 1024) ** power] * 3, 5)
        for subject, seconds, power in (
            ("softmax", 1.0, 2),
            ("eq4", 0.2, 1),
            ("eq7", 0.1, 1),
            ("copy", 0.01, 1),
        )
        for N in (256, 1024, 4096, 16384, *([65536] if power == 1 else []))
        for passes in ("forward", "forward+backward")
    ]
    about = {"machine": "a test", "threads": 1, "torch": "2", "date": "today", "heads": 2, "head_size": 64}
    write_rows(rows, about, tmp_path / "out" / "time")
    return draw_time_panel(tmp_path / "out" / "time")


@pytest.fixture
def convergence(tmp_path: Path) -> Panel:
    """Eq. 4 is as good as softmax, Eq. 7 a third worse, both in every seed."""
    ends = {"softmax": (SOFTMAX, 1.00), "eq4": (EQ4, 1.01), "eq7": (EQ7, 1.33), "gain": (GAIN, 1.0)}
    folders = {
        kind: [
            write_run(
                tmp_path / "runs" / f"{kind}-{seed}",
                attention,
                [5.0, 2.0, end + 0.1 * seed],
                seed=seed,
                top1=0.5,
            )
            for seed in (0, 1, 2)
        ]
        for kind, (attention, end) in ends.items()
    }
    return convergence_panel(read_curves(folders), FACTS, tmp_path / "out" / "convergence")


@pytest.fixture
def fit(tmp_path: Path) -> Panel:
    """The paper's law of softmax, and one of another exponent, without any scatter."""
    laws = {"softmax": (593.0, 0.362), "eq7": (376.0, 0.3)}
    folders = scaling_runs(tmp_path / "sized", laws, [10**5, 10**6, 10**7, 10**8, 10**9])
    return fit_panel(folders, FACTS, tmp_path / "out" / "fit")


def test_times_are_judged_by_their_slopes(time: Panel) -> None:
    assert [claim.verdict for claim in time.claims] == [
        "agrees",
        "agrees",
        "agrees",
        "can't tell",
        "can't tell",
    ]
    assert time.numbers["slopes"]["softmax"] == pytest.approx(2.0)
    assert time.tables[0].rows[-2] == ["16,384", "256,000.0", "3,200.0", "1,600.0", "80.0", "160.0"]
    assert time.tables[0].rows[-1][1] == "-"  # softmax wasn't timed there


def test_convergence_is_judged_against_softmax_and_between_the_equations(convergence: Panel) -> None:
    assert verdicts(convergence) == {
        "Eq. 4 converges like softmax.": "agrees",
        "Eq. 7 converges like softmax.": "disagrees",
        "Eq. 7 converges like Eq. 4.": "disagrees",
        "Eq. 7 + gain, 1/N converges like softmax.": "agrees",
    }
    row = next(row for row in convergence.tables[0].rows if row[0] == "Eq. 7")
    assert row[3] == "1.430 [1.330, 1.530]"
    assert row[4].startswith("50.0 %")


def test_kinds_are_compared_at_equal_time_too(tmp_path: Path) -> None:
    """Eq. 7 takes half of softmax's time a sample here, and ends higher after the same samples."""
    folders = {
        "softmax": [write_run(tmp_path / "a", SOFTMAX, [4.0, 2.0, 1.0], seconds_a_point=120)],
        "eq7": [write_run(tmp_path / "b", EQ7, [3.0, 1.6, 1.2], seconds_a_point=60)],
        "gain": [write_run(tmp_path / "c", GAIN, [3.0, 0.9, 0.8], seconds_a_point=80)],
    }
    panel = convergence_panel(read_curves(folders), FACTS, tmp_path / "out")
    assert panel.tables[1].rows == [
        ["softmax", "1.5 k", "3.000", "3 k samples, 6 min"],
        ["Eq. 7", "3 k", "1.200", "-"],
        ["Eq. 7 + gain, 1/N", "2.25 k", "0.875", "2 k samples, 2.7 min"],
    ]
    assert panel.numbers["softmax"]["minutes"] == pytest.approx([2, 4, 6])


def test_convergence_leaves_every_point_as_csv(convergence: Panel) -> None:
    path = next(iter(convergence.figures.values())).with_suffix(".csv")
    rows = list(csv.DictReader(path.open()))
    assert len(rows) == 4 * 3 * 3
    last = [row for row in rows if row["kind"] == "eq7" and row["seed"] == "2"][-1]
    assert (last["samples"], last["held_out_loss"], last["top1"]) == ("3000", "1.53", "0.5")


def test_runs_without_a_tree_have_a_panel_too(tmp_path: Path) -> None:
    folders = {
        "softmax": [write_run(tmp_path / "a", SOFTMAX, [2.0, 1.0])],
        "eq7": [write_run(tmp_path / "b", EQ7, [2.0, 1.1])],
    }
    panel = convergence_panel(read_curves(folders), FACTS, tmp_path / "out")
    assert [claim.verdict for claim in panel.claims] == ["can't tell"]  # one seed
    assert [row[4] for row in panel.tables[0].rows] == ["-", "-"]


def test_an_evaluation_that_failed_leaves_a_gap(tmp_path: Path) -> None:
    folders = {
        "softmax": [
            write_run(tmp_path / f"a{seed}", SOFTMAX, [2.0, 1.0], seed=seed, top1=0.5) for seed in (0, 1)
        ],
        "eq7": [
            write_run(tmp_path / "b0", EQ7, [2.0, 1.1], top1=0.4),
            write_run(tmp_path / "b1", EQ7, [2.0], seed=1),
        ],
    }
    panel = convergence_panel(read_curves(folders), FACTS, tmp_path / "out")
    assert "after 1,000 samples" in panel.claims[0].found  # where both have a loss
    assert panel.numbers["eq7"]["top1"] == [pytest.approx([0.4, 0.37, 0.43]), None]


def test_runs_without_any_held_out_loss_are_an_error(tmp_path: Path) -> None:
    metrics = write_run(tmp_path / "a", EQ7, [2.0]) / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"eval"' not in line))
    with pytest.raises(RunError, match="no held-out loss at equal samples"):
        read_curves({"eq7": [metrics.parent]})


def test_the_fit_tells_laws_apart(fit: Panel) -> None:
    assert "N^-0.300 with Eq. 7, N^-0.362 with softmax" in fit.claims[0].found
    assert fit.claims[0].verdict == "disagrees"
    assert len(fit.tables[1].rows) == 5
    assert fit.numbers["laws"]["softmax"]["a"] == pytest.approx(593, rel=1e-6)


class _Outside(HTMLParser):
    """Collects what a page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [
            str(value) for name, value in attrs if name == "src" or (name == "href" and tag == "link")
        ]


def test_the_page_stands_alone_and_says_everything(
    tmp_path: Path, time: Panel, convergence: Panel, fit: Panel
) -> None:
    out, panels = tmp_path / "out", [time, convergence, fit]
    paths = write_panels(panels, {"Made with": "a test"}, "Only a test.", out)
    page = (out / "reproduction.html").read_text()
    outside = _Outside()
    outside.feed(page)
    assert outside.loads == []
    assert page.count("<svg") == 3
    assert "Only a test." in page
    assert "3 &lt;pairs&gt; &amp; more" in page
    content = json.loads((out / "reproduction.json").read_text())
    assert list(content["panels"]) == ["time", "convergence", "fit"]
    markdown = (out / "reproduction.md").read_text()
    for panel in panels:
        for claim in panel.claims:
            assert claim.found in markdown
    for figure in ("time/time.png", "convergence/convergence.png", "fit/scaling.png"):
        assert f"({figure})" in markdown
        assert (out / figure).stat().st_size > 10_000
    assert all(path.exists() for path in paths)
    assert "DISAGREES   Eq. 7 converges like softmax." in text_of(panels)
