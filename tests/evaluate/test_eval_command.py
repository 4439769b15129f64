"""What `clip-la eval` does with its flags, and what it prints."""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import pytest
from toy_clip import toy_bundle
from toy_tree import make_tree

from clip_la.evaluate.command import ZeroShotOptions, add_arguments, format_zero_shot, run_zero_shot

COUNTS = {"kite": 4, "zebra": 6, "hat": 5}


def parse(*flags: str | Path) -> ZeroShotOptions:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return ZeroShotOptions.from_args(parser.parse_args(list(map(str, flags))))


def test_defaults_of_the_flags_are_those_of_the_options(tmp_path: Path) -> None:
    assert parse("--zeroshot", tmp_path, "--classnames", "a.txt") == ZeroShotOptions(tmp_path, "a.txt")


def test_report_files_and_table(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", COUNTS)
    (tree / "hat" / "broken.png").write_bytes(b"")
    (tree / "classnames.txt").write_text("kite\nzebra\nhat\nyak")
    rows, whole = tmp_path / "out" / "rows.csv", tmp_path / "out" / "all.json"
    options = parse(
        *("--zeroshot", tree, "--classnames", tree / "classnames.txt", "--templates", "plain"),
        *("--workers", "0", "--allow-missing-classes", "--per-class-csv", rows, "--json", whole),
    )

    report = run_zero_shot(toy_bundle(), options, checkpoint="epoch_3.pt")

    assert json.loads(whole.read_text()) == report
    assert report["metrics"]["num_images"] == 15
    assert report["checkpoint"] == "epoch_3.pt"
    assert report["attention"] == {"kind": "softmax"}
    wrong = report["metrics"]["num_images"] - report["metrics"]["num_top1"]
    assert sum(pair["num_images"] for pair in report["most_confused"]) == wrong > 0
    assert [row["name"] for row in csv.DictReader(rows.open())] == ["kite", "zebra", "hat", "yak"]

    table = format_zero_shot(report)
    assert f"{report['metrics']['top1']:.2%}" in table
    assert "chance 25.00%" in table
    assert "plain (" in table
    assert "1 image(s) could not be read" in table
    assert "1 class(es) have no folder" in table
    assert "share their name" not in table


@pytest.mark.parametrize("flag", ["--zeroshot", "--classnames"])
def test_tree_and_names_are_required(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(flag, "x")
    assert "required" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", COUNTS)
    options = parse("--zeroshot", tree, "--classnames", tree / "classnames.txt", "--json", tmp_path)
    with pytest.raises(ValueError, match="it is a folder"):
        run_zero_shot(toy_bundle(), options)
