"""Class lists that need no file, and trees that try to fool the mapping."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import open_clip
import pytest
from PIL import Image
from toy_clip import toy_bundle
from toy_tree import make_tree

from clip_la.evaluate import wordnet
from clip_la.evaluate.classes import CLASS_LISTS, load_classes
from clip_la.evaluate.mapping import map_folders
from clip_la.evaluate.zeroshot import ZeroShot

SIZES = {
    "imagenet-1k": 1000,
    "imagenet-v2": 1000,
    "imagenet-a": 200,
    "imagenet-r": 200,
    "imagenet-21k-p": 11_221,
    "imagenet-21k-p-winter21": 10_450,
    "imagenet-22k": 21_841,
}


def evaluate(tree: Path, classnames: str | Path | None = None, **options: Any) -> dict[str, Any]:
    return ZeroShot(tree, classnames, "plain", workers=0, **options).run(toy_bundle())


@pytest.mark.parametrize("name", [name for name in CLASS_LISTS if name != "wordnet"])
def test_sizes(name: str) -> None:
    classes = load_classes(name)
    assert len(classes) == len(set(classes.folders)) == SIZES[name]
    assert all(classes.names)
    if name != "imagenet-v2":
        assert all(wordnet.definition_of(str(folder)) for folder in classes.folders)


def test_subsets_are_of_imagenet_1k_and_releases_of_each_other() -> None:
    ids = {name: set(load_classes(name).folders) for name in wordnet.RELEASES}
    assert ids["imagenet-a"] < ids["imagenet-1k"]
    assert ids["imagenet-r"] < ids["imagenet-1k"]
    assert ids["imagenet-21k-p-winter21"] < ids["imagenet-21k-p"] < ids["imagenet-22k"]


def test_imagenet_v2_is_by_number() -> None:
    classes = load_classes("imagenet-v2")
    mapping = map_folders([str(i) for i in reversed(range(1000))], classes)
    names = tuple(classes.names[mapping.class_of[str(i)]] for i in range(1000))
    assert names == tuple(open_clip.IMAGENET_CLASSNAMES)
    with pytest.raises(ValueError, match=r"1 folder\(s\) are out of the range 0 to 999: 1000"):
        map_folders([str(i) for i in range(1001)], classes)


def test_folders_of_numbers_need_to_be_told(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", {"0": 2, "1": 2, "10": 1})
    names = tmp_path / "names.txt"
    names.write_text("\n".join(f"thing {i}" for i in range(11)))
    with pytest.raises(ValueError, match=r"3 folder\(s\) are mere numbers.*--numeric-labels"):
        evaluate(tree, names)
    evaluator = ZeroShot(tree, names, numeric_labels=True, allow_missing_classes=True)
    assert evaluator.mapping.class_of == {"0": 0, "1": 1, "10": 10}
    names.write_text("0\tzero\n1\tone\n10\tten\n")
    for told in (False, True):  # a file that states the numbers is believed
        assert ZeroShot(tree, names, numeric_labels=told).mapping.class_of == {"0": 0, "1": 1, "10": 2}


def test_keras_index_counts_by_its_keys(tmp_path: Path) -> None:
    index = {str(i): [wnid, name] for i, (wnid, name) in enumerate(wordnet.imagenet_1k().items())}
    path = tmp_path / "imagenet_class_index.json"
    path.write_text(json.dumps(dict(sorted(index.items()))))  # "0", "1", "10", "100", ...
    assert load_classes(path, by_index=True).names == tuple(open_clip.IMAGENET_CLASSNAMES)


def test_a_subset_by_class_list(tmp_path: Path) -> None:
    """ObjectNet's way: many folders, of which a list says which count and what they are called."""
    tree = make_tree(tmp_path / "tree", {"air_freshener": 3, "alarm_clock": 2, "backpack": 4, "zipper": 1})
    names = tmp_path / "subset.json"
    names.write_text(json.dumps({"alarm_clock": "analog clock", "backpack": "backpack"}))
    with pytest.raises(ValueError, match=r"2 folder\(s\) are no class: air_freshener, zipper"):
        evaluate(tree, names)
    metrics = evaluate(tree, names, allow_unknown_folders=True)
    assert (metrics["num_images"], metrics["num_classes"], metrics["num_unknown_folders"]) == (6, 2, 2)


def test_winter21_style_folders_state_their_own_classes(tmp_path: Path) -> None:
    ids = ["n02012849", "n00007846", "n03126707", "n99999999"]
    tree = make_tree(tmp_path / "tree", dict.fromkeys(ids, 1))
    with pytest.raises(ValueError, match=r"1 folder\(s\) are no class: n99999999"):
        evaluate(tree, "wordnet")
    metrics = evaluate(tree, "wordnet", allow_unknown_folders=True, per_class_csv=tmp_path / "rows.csv")
    assert metrics["class_list"] == "the data's own 3 WordNet ids"
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [row["folder"] for row in rows] == sorted(ids[:3])
    assert rows[0]["definition"] == "a human being"


def test_folders_of_21k_in_an_evaluation_of_1k(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", {"n00007846": 1, "n02012849": 1})  # person, crane bird
    with pytest.raises(ValueError, match=r"1 folder\(s\) are no class: n00007846") as error:
        evaluate(tree, "imagenet-1k")
    assert "999 class(es) have no folder" in str(error.value)
    metrics = evaluate(tree, "imagenet-1k", allow_unknown_folders=True, allow_missing_classes=True)
    assert (metrics["num_images"], metrics["num_classes"]) == (1, 1000)


NASTY = ("tench, Tinca tinca", "Ærøskøbing café", "日本語", "rock 'n' \"roll\"", "a/c unit")


@pytest.mark.parametrize("form", ["txt", "tsv", "json", "csv", "csv with header"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_names_with_commas_quotes_and_unicode(tmp_path: Path, form: str, bom: bytes) -> None:
    folders = [f"f{i}" for i in range(len(NASTY))]
    pairs = list(zip(folders, NASTY, strict=True))
    path = tmp_path / f"names.{form.split()[0]}"
    if form == "json":
        path.write_bytes(bom + json.dumps(dict(pairs), ensure_ascii=False).encode())
    elif form.startswith("csv"):
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("wnid", "label")] * ("header" in form) + pairs)
        path.write_bytes(bom + path.read_bytes())
    else:
        path.write_bytes(bom + "\r\n".join(f"{folder}\t{name}" for folder, name in pairs).encode())
    classes = load_classes(path)
    assert (classes.names, classes.folders) == (NASTY, tuple(folders))


def test_one_image(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", {"kite": 1})
    metrics = evaluate(tree)
    assert (metrics["num_images"], metrics["top1"], metrics["num_classes"]) == (1, 1, 1)
    assert metrics["top1_low"] < 0.5 < metrics["top1_high"] == 1


def test_two_folders_of_one_class(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", {"big_dog": 1, "Big Dog": 1})
    with pytest.raises(ValueError, match=r"several folders: 'big dog' \(Big Dog, big_dog\)"):
        evaluate(tree)


def test_unreadable_links_and_odd_files(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", {"kite": 2, "hat": 2})
    before = evaluate(tree)
    outside = tmp_path / "outside"
    outside.mkdir()
    Image.new("RGB", (8, 8), (9, 200, 30)).save(outside / "a.PNG")
    (tree / "kite" / "linked.png").symlink_to(outside / "a.PNG")
    (tree / "hat" / "linked folder").symlink_to(outside, target_is_directory=True)
    assert evaluate(tree)["num_images"] == before["num_images"] + 2
    (tree / "hat" / "dangling.png").symlink_to(tmp_path / "nowhere")
    (tree / "hat" / "folder.jpg").mkdir()
    (tree / "yak").mkdir()
    (tree / "classnames.txt").write_text("kite\nhat\nyak")
    metrics = evaluate(tree)
    assert metrics["num_unreadable"] == 1
    assert metrics["num_classes_without_images"] == 1
    assert metrics["num_images"] == before["num_images"] + 2


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(tmp_path / "tree", {"kite": 2, "hat": 2})
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("hat"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="hat"):
        evaluate(tree)


def test_a_file_name_that_is_no_text(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", {"kite": 2})
    (tree / "kite" / "caf\udce9.png").write_bytes(b"broken")
    metrics = evaluate(tree)
    assert (metrics["num_images"], metrics["num_unreadable"]) == (2, 1)
