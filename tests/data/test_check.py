from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from shard_builders import byte_tokenize, encode_image, good_tar, pair, picture, tar_bytes, write_shards

from clip_la.data.check import check_data
from clip_la.data.spec import DataSpec


def test_clean_shards(tmp_path: Path) -> None:
    data = write_shards(tmp_path, [range(3), range(3, 8)])
    (tmp_path / "sizes.json").write_text(json.dumps({"00000.tar": 3, "00001.tar": 9}))
    report = check_data(DataSpec(data, 1), byte_tokenize, progress=False)
    assert report.is_clean
    content = json.loads(json.dumps(report.to_dict()))
    assert (content["usable"], content["pairs"], content["shards"], content["losses"]) == (8, 8, 2, {})
    assert content["short_side"] == {"least": 8, "median": 8, "greatest": 8}
    assert [(part["usable"], part["recorded"]) for part in content["parts"]] == [(3, 3), (5, 9)]


@pytest.mark.parametrize("workers", [0, 2])
def test_losses(tmp_path: Path, workers: int) -> None:
    entries = [*pair(0), ("bad.jpg", b"<html>"), ("bad.txt", b"a"), ("alone.jpg", picture(1))]
    (tmp_path / "0.tar").write_bytes(tar_bytes(entries))
    (tmp_path / "1.tar").write_bytes(good_tar([1, 2])[:1024])
    data = f"{tmp_path}/{{0..2}}.tar"
    report = check_data(DataSpec(data, 1), byte_tokenize, workers=workers, progress=False)
    assert not report.is_clean
    content = report.to_dict()
    assert content["losses"] == {
        "image_format": 1,
        "no_text": 2,
        "shard_missing": 1,
        "shard_truncated": 1,
    }
    examples = {example["cause"]: example for example in content["examples"]}
    assert examples["image_format"]["key"] == "bad"
    assert examples["shard_missing"]["shard"] == f"{tmp_path}/2.tar"
    assert [part["usable"] for part in content["parts"]] == [1, 0, 0]


def test_bad_samples_cost_only_themselves_and_are_named(tmp_path: Path) -> None:
    whole = encode_image(Image.effect_noise((64, 64), 90), "JPEG")
    bad = {
        "corrupt": (whole[:1000] + b"\xff\x01" * 20 + whole[1040:], b"a"),
        "truncated": (whole[: len(whole) // 2], b"b"),
        "latin1": (picture(3), "café".encode("latin-1")),
        "empty": (picture(4), b""),
    }
    entries = [
        *pair(0),
        ("json.jpg", picture(1)),
        ("json.txt", b"good number 1"),
        ("json.json", b'{"broken":'),
    ]
    for key, (image, caption) in bad.items():
        entries += [(f"{key}.jpg", image), (f"{key}.txt", caption)]
    (tmp_path / "0.tar").write_bytes(tar_bytes(entries))
    spec = DataSpec(f"{tmp_path}/0.tar", 1)
    report = check_data(spec, byte_tokenize, progress=False)
    assert report.num_usable == 2  # the broken json costs nothing
    assert report.losses.to_counts() == {"image_corrupt": 2, "text_empty": 1, "text_encoding": 1}
    named = {(loss.shard, loss.key) for loss in report.losses.first.values()}
    assert named == {(f"{tmp_path}/0.tar", key) for key in ("corrupt", "latin1", "empty")}
    kept = check_data(replace(spec, empty_caption="keep"), byte_tokenize, progress=False)
    assert kept.num_usable == 3


def test_nothing_at_all_is_not_clean(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(good_tar([]))
    report = check_data(DataSpec(f"{tmp_path}/0.tar", 1), byte_tokenize, progress=False)
    assert not report.is_clean
    assert report.to_dict()["short_side"] is None


def test_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(1))
    table = tmp_path / "t.csv"
    table.write_text(f"image,caption\n{tmp_path}/a.png,cat\n{tmp_path}/b.png,dog\n")
    spec = DataSpec(str(table), 1, csv_img_key="image", csv_caption_key="caption", csv_separator=",")
    report = check_data(spec, byte_tokenize, progress=False)
    assert report.num_usable == 1
    assert report.losses.to_counts() == {"no_image": 1}
    assert report.parts[0].name == f"{table} rows 0-1"
