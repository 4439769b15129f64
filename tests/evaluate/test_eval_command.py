"""What `clip-la eval` does with its flags, and what it prints."""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_clip import ToyClip, toy_bundle
from toy_shards import shards_of_tree
from toy_tree import make_tree

from clip_la.cli import main
from clip_la.evaluate.command import EvalOptions, add_data_arguments, format_evaluation, run_evaluation
from clip_la.exit_codes import EXIT_FAILED, EXIT_USAGE

COUNTS = {"kite": 4, "zebra": 6, "hat": 5}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLIP_LA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def parse(*flags: str | Path) -> EvalOptions:
    parser = argparse.ArgumentParser()
    add_data_arguments(parser)
    return EvalOptions.from_args(parser.parse_args(list(map(str, flags))))


def test_defaults_of_the_flags_are_those_of_the_options() -> None:
    assert parse("--zeroshot", "tree", "--classnames", "a.txt") == EvalOptions("tree", "a.txt")
    assert parse("--retrieval", "a.csv") == EvalOptions(retrieval="a.csv")


def test_report_files_and_table(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", COUNTS)
    (tree / "hat" / "broken.png").write_bytes(b"")
    (tree / "classnames.txt").write_text("kite\nzebra\nhat\nyak")
    rows, whole = tmp_path / "out" / "rows.csv", tmp_path / "out" / "all.json"
    options = parse(
        *("--zeroshot", tree, "--classnames", tree / "classnames.txt", "--templates", "plain"),
        *("--workers", "0", "--allow-missing-classes", "--per-class-csv", rows, "--json", whole),
    )

    report = run_evaluation(toy_bundle(), options, checkpoint="epoch_3.pt")

    assert json.loads(whole.read_text()) == report
    assert report["name"] == "zeroshot/tree"
    assert report["metrics"]["num_images"] == 15
    assert report["checkpoint"] == "epoch_3.pt"
    assert report["attention"] == {"kind": "softmax"}
    wrong = report["metrics"]["num_images"] - report["metrics"]["num_top1"]
    assert sum(pair["num_images"] for pair in report["most_confused"]) == wrong > 0
    assert [row["name"] for row in csv.DictReader(rows.open())] == ["kite", "zebra", "hat", "yak"]

    table = format_evaluation(report)
    assert f"{report['metrics']['top1']:.2%}" in table
    assert "chance 25.00%" in table
    assert "plain (" in table
    assert f"{tree}/classnames.txt (" in table
    assert "1 image(s) could not be read" in table
    assert "1 class(es) have no folder" in table
    assert "share their name" not in table


def test_shards_print_the_same_table(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", COUNTS)
    shards = shards_of_tree(tree, tmp_path / "shards", str, sizes=(4, 11))
    flags = ("--classnames", tree / "classnames.txt", "--workers", "0", "--templates", "photo")
    tables = [
        format_evaluation(run_evaluation(toy_bundle(), parse("--zeroshot", data, *flags))).splitlines()
        for data in (tree, shards)
    ]
    assert [line for line in tables[0] if "images" not in line] == [
        line for line in tables[1] if "images" not in line
    ]


def test_retrieval(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree", COUNTS)
    lines = [
        f"{path.name}\tnumber {n}" for path in sorted((tmp_path / "tree" / "kite").iterdir()) for n in "ab"
    ]
    (tmp_path / "pairs.tsv").write_text("\n".join(["image\tcaption", *lines, "absent.png\tx"]))
    options = parse(
        *("--retrieval", tmp_path / "pairs.tsv", "--images", tmp_path / "tree" / "kite"),
        *("--workers", "0", "--json", tmp_path / "all.json"),
    )
    report = run_evaluation(toy_bundle(), options)
    assert json.loads((tmp_path / "all.json").read_text()) == report
    assert report["name"] == "retrieval/pairs"
    table = format_evaluation(report)
    assert "4 images, 8 captions" in table
    assert f"recall @1 {report['metrics']['image_to_text_recall@1']:.2%}" in table
    assert "1 caption(s) of images that could not be read" in table


class CountsTexts(ToyClip):
    num_texts = 0

    def encode_text(self, tokens: torch.Tensor) -> torch.Tensor:
        CountsTexts.num_texts += len(tokens)
        return super().encode_text(tokens)


def test_the_cache_is_used_moved_and_left_out(tmp_path: Path, cache: Path) -> None:
    tree = make_tree(tmp_path / "tree", COUNTS)
    given: tuple[Any, ...] = ("--zeroshot", tree, "--workers", "0", "--templates", "plain")
    for flags, num_texts in (
        (("--no-cache",), 3),
        (("--no-cache",), 6),
        ((), 9),
        ((), 9),
        (("--cache", tmp_path / "other"), 12),
        (("--cache", tmp_path / "other"), 12),
    ):
        run_evaluation(toy_bundle(CountsTexts()), parse(*given, *flags))
        assert CountsTexts.num_texts == num_texts
    assert len(list((cache / "text").iterdir())) == len(list((tmp_path / "other" / "text").iterdir())) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "one of the arguments --zeroshot --retrieval is required"),
        (("--zeroshot", "a", "--retrieval", "b"), "not allowed"),
    ],
)
def test_one_evaluation_at_a_time(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*flags)
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", COUNTS)
    options = parse("--zeroshot", tree, "--json", tmp_path)
    with pytest.raises(ValueError, match="it is a folder"):
        run_evaluation(toy_bundle(), options)


def test_the_model_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["eval", "--zeroshot", str(tmp_path)]
    assert main(given) == EXIT_USAGE
    assert "give either a checkpoint" in capsys.readouterr().err
    assert main([*given, "--model", "ViT-B-32"]) == EXIT_USAGE
    assert "ViT-B-32 has random weights; give --pretrained TAG or FILE" in capsys.readouterr().err
    assert main([*given, "--model", "ViT-nano-8", "--pretrained", str(tmp_path / "absent.pt")]) == EXIT_FAILED
    assert "ViT-nano-8 with" in capsys.readouterr().err
