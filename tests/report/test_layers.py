"""Diagnostics in the report: drawn where there are any, missed by nobody else."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from run_writer import FinishedRun, NewRun

from clip_la.report import write_report
from clip_la.report.layers import gradients_figures, layers_figures
from clip_la.report.runs import RunError, read_runs


def layers(start: float, num_layers: int = 3) -> dict[str, float]:
    names = ("output_norm", "output_to_residual", "query_to_constant", "entropy", "effective_rank")
    return {
        f"{tower}/{layer}/{name}": start + layer
        for tower in ("image", "text")
        for layer in range(num_layers)
        for name in names
    }


@pytest.fixture
def watched_run(new_run: NewRun) -> Path:
    run = new_run("watched").start().line("diagnostics", 0, layers=layers(1.0, 11))
    for samples in (500, 1000):
        run.train(samples, 2.0, grad_norm_image=0.5, grad_norm_text=0.25)
    return run.line("diagnostics", 1000, layers=layers(2.0, 11)).end(1000).folder


def test_the_page_has_the_figures_only_of_runs_that_measured(
    finished_run: FinishedRun, watched_run: Path, tmp_path: Path
) -> None:
    plain = finished_run("plain")
    write_report([plain], tmp_path / "without")
    assert "layer by layer" not in (tmp_path / "without" / "report.html").read_text()
    write_report([plain, watched_run], tmp_path / "with")
    page = (tmp_path / "with" / "report.html").read_text()
    assert "<h2>Diagnostics</h2>" in page
    assert 'aria-label="Image: entropy of the weights, Diagnostics"' in page
    rows = list(csv.DictReader((tmp_path / "with" / "diagnostics.csv").open(newline="")))
    assert len(rows) == 2 * 2 * 11 * 5
    assert list(rows[0].values()) == ["watched", "0", "image", "0", "output_norm", "1.0"]
    content = json.loads((tmp_path / "with" / "comparison.json").read_text())
    assert content["diagnostics"]["watched"]["last"]["layers"]["image/3/entropy"] == 5.0
    assert (tmp_path / "with" / "layers.png").is_file()
    assert not (tmp_path / "without" / "layers.png").exists()


def test_a_panel_a_figure_and_a_line_a_run(
    finished_run: FinishedRun, watched_run: Path, new_run: NewRun
) -> None:
    image_only = {key: value for key, value in layers(3.0).items() if key.startswith("image")}
    other = new_run("other").start(attention=None).train(10, 1.0).line("diagnostics", 10, layers=image_only)
    runs = read_runs([finished_run("plain"), watched_run, other.folder])
    (figure,) = layers_figures(runs)
    assert len(layers_figures(runs, stacked=False)) == len(figure.axes)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert len(titles) == 7
    assert titles[2] == "Image: entropy of the weights"
    assert "Text: effective rank of the weights" not in titles, "it says nothing of causal weights"
    entropy = figure.axes[2]
    first, last, of_other = entropy.get_lines()
    np.testing.assert_array_equal(last.get_xdata(), np.arange(11.0))
    np.testing.assert_array_equal(first.get_ydata(), 1.0 + np.arange(11))
    np.testing.assert_array_equal(last.get_ydata(), 2.0 + np.arange(11))
    np.testing.assert_array_equal(of_other.get_ydata(), [3.0, 4.0, 5.0])
    assert [text.get_text() for text in entropy.texts] == ["watched", "other"]
    assert [text.get_text() for text in figure.axes[6].texts] == ["watched"]


def test_gradients_by_tower(finished_run: FinishedRun, watched_run: Path) -> None:
    (figure,) = gradients_figures(read_runs([finished_run("plain"), watched_run]))
    image, text, scale = figure.axes
    np.testing.assert_array_equal(image.get_lines()[0].get_ydata(), [0.5, 0.5])
    np.testing.assert_array_equal(text.get_lines()[0].get_ydata(), [0.25, 0.25])
    np.testing.assert_array_equal(scale.get_lines()[0].get_ydata(), [14.3, 14.3])


def test_runs_without_diagnostics_have_no_figure(finished_run: FinishedRun) -> None:
    runs = read_runs([finished_run("plain")])
    assert layers_figures(runs) == []
    assert gradients_figures(runs) == []


def test_what_was_not_finite_is_drawn_around(new_run: NewRun, tmp_path: Path) -> None:
    broken = dict.fromkeys(layers(1.0))
    run = new_run("broken").start().train(10, None, grad_norm_image=None, grad_norm_text=0.0)
    run.line("diagnostics", 10, layers=broken).train(20, 1.0, grad_norm_image=0.0, grad_norm_text=0.0)
    (read,) = read_runs([run.folder])
    assert math.isnan(read.diagnostics[0].layers["image/0/entropy"])
    write_report([run.folder], tmp_path / "out")
    assert "<h2>Diagnostics</h2>" in (tmp_path / "out" / "report.html").read_text()


def test_a_resume_undoes_what_was_measured_after_it(new_run: NewRun) -> None:
    run = new_run("resumed").start().line("diagnostics", 0, layers=layers(1.0)).train(100, 1.0)
    run.line("diagnostics", 100, layers=layers(2.0)).line("diagnostics", 200, layers=layers(3.0))
    run.start(100, resumed=True).line("diagnostics", 100, layers=layers(2.5))
    (read,) = read_runs([run.folder])
    assert [(point.samples, point.layers["image/0/entropy"]) for point in read.diagnostics] == [
        (0, 1.0),
        (100, 2.5),
    ]


def test_a_line_without_layers_is_named(new_run: NewRun) -> None:
    run = new_run("broken").start().train(10, 1.0).line("diagnostics", 10)
    with pytest.raises(RunError, match=r"line 3 \(diagnostics\) has no 'layers'"):
        read_runs([run.folder])
