"""The written report: every file valid, self-contained, and saying what the runs say."""

from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image
from run_writer import FinishedRun, NewRun, RunWriter

from clip_la.report import ReportSummary, list_runs, listing_text, write_report
from clip_la.report.drawing import _spread, colour_of, looks_of
from clip_la.report.runs import RunError, read_runs
from clip_la.report.write import FILES

VOID_TAGS = {"meta", "br", "link", "img", "input"}
ONLY_WITH_DIAGNOSTICS = ("diagnostics.", "layers.", "gradients.")


class Page(HTMLParser):
    """Checks that tags nest, and collects attributes that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")
        ]
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID_TAGS:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> ReportSummary:
    """The report of a healthy run and of one whose loss stopped being finite; its name looks like markup."""
    logs = tmp_path_factory.mktemp("logs")
    healthy, broken = RunWriter(logs / "la").start(), RunWriter(logs / "<b>&nan").start(attention="eq4")
    for samples in range(100, 1001, 100):
        healthy.train(samples, 3.0 - 0.002 * samples)
        late = max(0, samples - 500)
        broken.train(samples, None if late else 3.0, skipped_steps=late // 100, lost_samples=late // 50)
    healthy.epoch(1000, 0, 2.0).eval(1000, "validation", loss=1.2).zeroshot(1000, 0.4).end(1000)
    broken.epoch(1000, 0, None, corrupt_image=10).eval(1000, "validation", loss=None).zeroshot(1000, 0.02)
    broken.end(1000, "non_finite")
    return write_report([healthy.folder, broken.folder], logs / "out" / "report")


def file_of(summary: ReportSummary, name: str) -> Path:
    (path,) = [path for path in summary.paths if path.name == name]
    return path


def test_all_files_are_written_and_valid(written: ReportSummary) -> None:
    assert written.paths[0].name == "report.html"
    expected = [name for name in FILES if not name.startswith(ONLY_WITH_DIAGNOSTICS)]
    assert sorted(path.name for path in written.paths) == sorted(expected)
    for path in written.paths:
        if path.suffix == ".png":
            with Image.open(path) as image:
                image.load()
                assert min(image.size) > 400
        elif path.suffix == ".svg":
            assert ET.parse(path).getroot().tag.endswith("svg")
    assert "la" in written.text
    assert "warning: <b>&nan: its loss was not finite in 5 log interval(s)." in written.text


def test_page_is_whole_and_needs_no_network(written: ReportSummary) -> None:
    text = written.paths[0].read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert all(reference.startswith("#") for reference in page.references)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert not re.search(r"@import|<script|<link|<iframe|<img", text)
    assert "<b>&nan" in page.text, "a run's name is text, not markup"
    num_axes, num_curves, num_machine = 3, 3, 5
    assert text.count("<svg ") == num_axes * num_curves + num_machine
    ids = re.findall(r' id=["\']([^"\']+)["\']', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(ids)


def test_what_is_wrong_stands_on_top_and_beside_the_run(written: ReportSummary) -> None:
    text = written.paths[0].read_text()
    top = text[: text.index("<h2>Results</h2>")]
    assert "warnings: read before the numbers" in top
    for topic in ("not finite", "skipped steps", "lost samples", "stopped early", "not learning"):
        assert f"<b>{topic}.</b>" in top
        assert f"<li>{topic}</li>" in text[len(top) :]
    row = re.search(r"<tr><td data-label='Run'><div>&lt;b&gt;&amp;nan.*?</tr>", text)
    assert row is not None
    bad = re.findall(r"data-label='([^']+)' class='bad'", row[0])
    assert bad == ["State", "Training loss", "Skipped steps", "Lost samples"]
    assert "<td data-label='Run'>la</td>" in text, "beside the healthy run stands nothing"


def test_curves_are_data_too(written: ReportSummary) -> None:
    with file_of(written, "training.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 20
    first = rows[0]
    assert (first["run"], first["samples"], first["loss"], first["loss_smoothed"]) == (
        "la",
        "100",
        "2.8",
        "2.8",
    )
    assert float(first["flops"]) == 100 * 2e9
    assert float(rows[9]["hours"]) == pytest.approx(10 / 3600)
    assert rows[-1]["loss"] == "nan"
    assert float(first["peak_memory_bytes"]) == 2**30
    with file_of(written, "evaluations.csv").open(newline="") as file:
        found = {(row["run"], row["metric"]): row["value"] for row in csv.DictReader(file)}
    assert found["la", "top1"] == "0.4"
    assert found["<b>&nan", "loss"] == "nan"


def test_json_is_strict_and_round_trips(written: ReportSummary) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    content = json.loads(file_of(written, "comparison.json").read_text(), parse_constant=refuse)
    good, bad = content["runs"]
    assert good["zeroshot"][0]["top1"] == 0.4
    assert good["train_loss"] == pytest.approx(1.0)
    assert good["model_facts"]["sample_flops"] == 2e9
    assert (bad["train_loss"], bad["state"]) == (None, "stopped (non_finite)")
    assert content["config"]["equal"]["batch_size"] == 128
    assert any(finding["severity"] == "warning" for finding in content["findings"])
    assert [kind["label"] for kind in content["kinds"]] == ["Eq. 7", "Eq. 4"]
    (top1,) = content["paired_differences"]
    assert (top1["metric"], top1["interval"]) == ("top-1, held_out", None)
    assert top1["mean"] == pytest.approx(-0.38)


def test_csv_has_a_row_a_run_with_plain_numbers(written: ReportSummary) -> None:
    with file_of(written, "comparison.csv").open(newline="") as file:
        good, bad = csv.DictReader(file)
    assert float(good["zeroshot/held_out/top1"]) == 0.4
    assert float(good["validation/last"]) == 1.2
    assert int(good["num_parameters"]) == 1_500_000
    assert bad["train_loss"] == "nan"
    assert bad["lost/corrupt_image"] == "10"


def test_markdown_is_a_table(finished_run: FinishedRun, tmp_path: Path) -> None:
    write_report([finished_run("a|b"), finished_run("c")], tmp_path)
    lines = (tmp_path / "comparison.md").read_text().splitlines()
    rows = [re.split(r"(?<!\\)\|", line) for line in lines if line.startswith("|")]
    assert len(rows) == 4
    assert len({len(row) for row in rows}) == 1
    assert "40.0 % [37.0, 44.0]" in lines[2]
    assert "2.50 %" in lines[2]


def test_report_is_the_same_each_time(finished_run: FinishedRun, tmp_path: Path) -> None:
    runs = [finished_run("a"), finished_run("b", attention=None)]
    for out in ("first", "second"):
        write_report(runs, tmp_path / out, now=2e9)
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "second").iterdir())
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_old_zeroshot_figure_does_not_stay(
    finished_run: FinishedRun, new_run: NewRun, tmp_path: Path
) -> None:
    write_report([finished_run("a")], tmp_path / "out")
    without = new_run("b").start().train(1000, 1.0).end(1000).folder
    summary = write_report([without], tmp_path / "out")
    assert not [path for path in (tmp_path / "out").iterdir() if path not in summary.paths]
    assert "No run has been evaluated zero-shot yet" in (tmp_path / "out" / "report.html").read_text()


def test_damaged_runs_are_left_out_and_named_first(
    finished_run: FinishedRun, new_run: NewRun, tmp_path: Path
) -> None:
    corrupt = new_run("corrupt").start().raw("oops\n").train(100, 3.0).folder
    cut = new_run("cut").start().train(100, 3.0).raw('{"type": "train", "sam').folder
    empty = new_run("empty").folder
    summary = write_report([finished_run("a"), corrupt, cut, empty], tmp_path / "out")
    first, second = summary.findings[:2]
    assert "corrupt is not in this report" in first.message
    assert "line 2 is not JSON" in first.message
    assert "empty is not in this report" in second.message
    assert [run.name for run in summary.comparison.summaries] == ["a", "cut"]
    with pytest.raises(RunError, match="no such folder"):
        write_report([corrupt, tmp_path / "typing-mistake"], tmp_path / "other")
    with pytest.raises(RunError, match=r"(?s)line 2 is not JSON.*logged nothing"):
        write_report([corrupt, empty], tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_report_of_nothing_writes_nothing(new_run: NewRun, tmp_path: Path) -> None:
    with pytest.raises(RunError):
        write_report([new_run("a").folder], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_log_axis_takes_runs_that_are_never_finite(new_run: NewRun, tmp_path: Path) -> None:
    run = new_run("a").start().train(100, None).train(200, None).end(200, "non_finite")
    summary = write_report([run.folder], tmp_path / "out", log_axis=True)
    assert file_of(summary, "curves.png").stat().st_size > 1000


def test_one_colour_a_kind_and_one_style_a_run_of_it(finished_run: FinishedRun) -> None:
    gain = {"kind": "eq7", "gain": "learned"}
    centred = {**gain, "centre_values": True}
    names = {"softmax": None, "eq4": "eq4", "eq7": "eq7", "gain": gain, "centred": centred}
    runs = read_runs([finished_run(name, attention=spec) for name, spec in names.items()])
    assert len({colour_of(run.attention) for run in runs}) == len(runs)
    again = read_runs([finished_run(f"seed{i}", {"lr": 0.1 * i}, attention="eq7") for i in range(2)])
    assert len({colour_of(run.attention) for run in again}) == 1
    assert {look.label for look in looks_of(again).values()} == {"seed0", "seed1"}
    assert len({str(look.line_style) for look in looks_of(again).values()}) == 2


def test_labels_are_spread_without_overlap() -> None:
    heights = [0.1, 0.2, 0.1, 0.1]
    placed = _spread([0.3, 0.31, 0.32, 0.99], heights)
    gaps = [b - a for a, b in pairwise(placed)]
    needed = [(a + b) / 2 for a, b in pairwise(heights)]
    assert all(gap >= need - 1e-9 for gap, need in zip(gaps, needed, strict=True))
    assert placed[-1] + 0.05 <= 1 + 1e-9
    assert _spread([0.2, 0.8], [0.1, 0.1]) == pytest.approx([0.2, 0.8])


def test_runs_are_listed_with_broken_ones(finished_run: FinishedRun, new_run: NewRun) -> None:
    folder = finished_run("a")
    new_run("broken").start().raw("oops\n").train(100, 3.0)
    running = new_run("young").start()
    listed = list_runs(folder.parent, now=running.time + 10)
    assert [run.path.name for run in listed] == ["a", "broken", "young"]
    assert listed[1].summary is None
    text = listing_text(listed)
    assert re.search(r"a +finished +100 % of 1 k +Eq\. 7 +1\.0\d\d +held_out 40\.0 %", text)
    assert re.search(r"broken +unreadable", text)
    assert "line 2 is not JSON" in text
    assert re.search(r"young +running +0 % of 1 k", text)


def test_listing_a_folder_without_runs(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        list_runs(tmp_path)
    with pytest.raises(RunError, match="no such folder"):
        list_runs(tmp_path / "nowhere")
