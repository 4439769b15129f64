"""Zero-shot over shards: the same counts as over folders; labels by index, name or WordNet id."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
from toy_clip import toy_bundle
from toy_shards import shards_of_tree, write_tar
from toy_tree import make_tree

from clip_la.evaluate.shards import NumberedShards, find_shards, name_of
from clip_la.evaluate.zeroshot import ZeroShot

COUNTS = {"zebra": 9, "kite": 4, "hat": 7, "green_apple": 5, "crane": 1, "bottle": 3}
NAMES = ("bottle", "crane", "green apple", "hat", "kite", "zebra")  # classnames.txt has them in this order


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "tree", COUNTS)


def run(data: str | Path, classnames: str | Path | None = None, **options: Any) -> dict[str, Any]:
    settings = {"templates": "simple-7", "batch_size": 4, "workers": 0, **options}
    return ZeroShot(data, classnames, **settings).run(toy_bundle())


def index_of(folder: str) -> str:
    return str(NAMES.index(folder.replace("_", " ")))


def counts(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if not key.startswith("class_list")}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("label", [index_of, str, lambda folder: f" {folder.upper()}\n"])
def test_equal_to_folders(tree: Path, tmp_path: Path, label: Any, workers: int) -> None:
    shards = shards_of_tree(tree, tmp_path / "shards", label)
    names = tree / "classnames.txt"
    assert run(shards, names, workers=workers)["num_images"] == sum(COUNTS.values())
    # Sorted alike, so that even the batches are the same.
    found = run(shards, names, workers=workers)
    expected = run(tree, names)
    assert found.pop("num_unreadable") == 1  # the empty shard, which is named
    assert expected.pop("num_unreadable") == 0
    assert counts(found) == counts(expected)


def test_clip_benchmarks_layout_needs_no_flags(tree: Path, tmp_path: Path) -> None:
    root = tmp_path / "wds_pets"
    shards_of_tree(tree, root / "test", index_of, sizes=(20, 10**6))
    (root / "classnames.txt").write_text("\n".join(NAMES))
    (root / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\n")
    for data in (root, root / "test", f"{root}/test/{{00000..00001}}.tar"):
        evaluator = ZeroShot(data, workers=0)
        metrics = evaluator.run(toy_bundle())
        assert metrics["num_images"] == sum(COUNTS.values())
        assert metrics["templates"].endswith("zeroshot_classification_templates.txt")
        assert metrics["class_list"] == str(root / "classnames.txt")
        assert evaluator.name == "zeroshot/wds_pets"


def test_duplicate_names_stay_two_classes_when_labels_count_them(tree: Path, tmp_path: Path) -> None:
    shards = shards_of_tree(tree, tmp_path / "shards", index_of, sizes=(10**6,))
    names = tmp_path / "names.txt"
    names.write_text("bottle\ncrane\ngreen apple\ncrane\nkite\nzebra\n")
    metrics = run(shards, names)
    assert (metrics["num_classes"], metrics["num_duplicate_names"]) == (6, 2)


def test_wordnet_ids(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", {"n01440764": 3, "n02012849": 2})
    shards = shards_of_tree(tree, tmp_path / "shards", str, sizes=(10**6,))
    metrics = run(shards, "wordnet", per_class_csv=tmp_path / "rows.csv")
    assert (metrics["num_classes"], metrics["class_list"]) == (2, "the data's own 2 WordNet ids")
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [row["name"] for row in rows] == ["tench", "crane bird"]
    assert "wading bird" in rows[1]["definition"]
    with pytest.raises(ValueError, match=r"998 class\(es\) have no label"):
        run(shards, "imagenet-1k")
    assert run(shards, "imagenet-1k", allow_missing_classes=True)["num_missing_classes"] == 998


def test_indices_need_a_list_that_they_count(tree: Path, tmp_path: Path) -> None:
    shards = shards_of_tree(tree, tmp_path / "shards", index_of, sizes=(10**6,))
    with pytest.raises(ValueError, match=r"no class names: .* has no classnames.txt beside it"):
        run(shards)
    with pytest.raises(ValueError, match="none of its 6 folders or labels is one"):
        run(shards, "wordnet")
    short = tmp_path / "short.txt"
    short.write_text("\n".join(NAMES[:4]))
    with pytest.raises(
        ValueError, match=r"2 label\(s\) are out of the range 0 to 3: 4, 5; give the class list"
    ):
        run(shards, short)
    metrics = run(shards, short, allow_unknown_folders=True)
    assert (metrics["num_unknown_folders"], metrics["num_images"]) == (2, 3 + 1 + 5 + 7)
    gap = tmp_path / "gap.txt"
    gap.write_text("\n".join([*NAMES[:2], "", *NAMES[2:]]))
    with pytest.raises(ValueError, match="line 3 is empty, so that the numbers"):
        run(shards, gap)


def test_digits_are_refused_where_place_and_name_differ(tree: Path, tmp_path: Path) -> None:
    shards = shards_of_tree(tree, tmp_path / "shards", index_of, sizes=(10**6,))
    names = tmp_path / "digits.txt"
    names.write_text("5\n4\n3\n2\n1\n0\n")
    with pytest.raises(
        ValueError, match=r"label 0 may be the class at place 0 of .* or the class of that name"
    ):
        run(shards, names)
    names.write_text("0\n1\n2\n3\n4\n5\n")
    assert run(shards, names)["num_images"] == sum(COUNTS.values())
    names.write_text("".join(f"{5 - i}\tdigit {i}\n" for i in range(6)))
    assert ZeroShot(shards, names, workers=0).mapping.class_of == {str(5 - i): i for i in range(6)}


def test_numbers_among_names_are_no_indices(tree: Path, tmp_path: Path) -> None:
    shards = shards_of_tree(
        tree, tmp_path / "shards", lambda folder: "3" if folder == "hat" else folder, sizes=(10**6,)
    )
    with pytest.raises(ValueError, match=r"1 label\(s\) are mere numbers.*`label<TAB>name`"):
        run(shards, tree / "classnames.txt")


def test_damage_is_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tree = make_tree(tmp_path / "tree", {"kite": 4, "hat": 4})
    image = (tree / "kite" / "000.png").read_bytes()
    shards = shards_of_tree(tree, tmp_path / "shards", str, sizes=(10**6,))
    members = [
        ("no-image.cls", b"kite"),
        *(("no-label.png", image), ("no-label.txt", b"kite")),
        *(("empty-label.jpg", image), ("empty-label.cls", b" \n")),
        *(("latin.png", image), ("latin.cls", b"caf\xe9")),
        *(("broken.PNG", b"no picture"), ("broken.CLS", b"kite")),
        *(("a/b/c.JPG", image), ("a/b/c.cls", b"kite")),
    ]
    write_tar(tmp_path / "shards" / "00001.tar", members)
    cut = write_tar(
        tmp_path / "shards" / "00002.tar",
        [("x.png", image), ("x.cls", b"hat"), ("y.cls", b"hat"), ("y.png", image)],
    )
    cut.write_bytes(cut.read_bytes()[: 7 * 512 + 20])
    (tmp_path / "shards" / "00003.tar").write_bytes(b"<html>404</html>")

    with caplog.at_level(logging.WARNING):
        result = ZeroShot(shards, tree / "classnames.txt", "plain", workers=0).evaluate(toy_bundle())

    assert result.metrics()["num_images"] == 8 + 1 + 1
    assert result.metrics()["num_unreadable"] == len(result.tally.unreadable)
    causes = [line.split()[0 if " in " in line else -1] for line in result.tally.unreadable]
    for cause in (
        "no_image",
        "no_label",
        "text_empty",
        "text_encoding",
        "member_truncated",
        "shard_not_a_tar",
    ):
        assert causes.count(cause) == 1
    assert any("broken: image_format" in line for line in result.tally.unreadable)
    assert "could not be read" in caplog.text


def test_what_is_no_set_of_shards(tmp_path: Path) -> None:
    write_tar(tmp_path / "x" / "a.tar", [("1.jpg", b"x"), ("1.txt", b"caption")])
    with pytest.raises(
        ValueError, match=r"no image with a \.cls member in .*\n  no_label in .*has only .jpg"
    ):
        run(tmp_path / "x", "imagenet-1k")
    with pytest.raises(ValueError, match=r"there is no shard .*b.tar"):
        run(f"{tmp_path}/x/{{a,b}}.tar", "imagenet-1k")
    with pytest.raises(ValueError, match="no shard matches"):
        run(f"{tmp_path}/y/*.tar", "imagenet-1k")


def test_a_shard_that_changes_is_noticed(tree: Path, tmp_path: Path) -> None:
    shards = shards_of_tree(tree, tmp_path / "shards", index_of, sizes=(10**6,))
    evaluator = ZeroShot(shards, tree / "classnames.txt", workers=0)
    write_tar(tmp_path / "shards" / "00000.tar", [])
    with pytest.raises(ValueError, match=r"had 29 images with a .cls, and has fewer now"):
        evaluator.run(toy_bundle())


def test_any_numbers_can_be_read(tree: Path, tmp_path: Path) -> None:
    shards = NumberedShards(shards_of_tree(tree, tmp_path / "shards", index_of), "cls")
    every = list(shards.read(range(29)))
    assert len(every) == 29
    for numbers in ([], [0], [28], [10, 11], [3, 14, 15, 27], [11, 12, 13]):
        assert list(shards.read(numbers)) == [every[number] for number in numbers]


def test_hostile_shards_are_listed_and_read_alike(shared_data: Path) -> None:
    num_read = 0
    for case in sorted(path for path in (shared_data / "hostile").iterdir() if path.is_dir()):
        for shard in sorted(case.glob("*.tar")):
            try:
                shards = NumberedShards(str(shard), "txt")
            except ValueError:  # nothing in it can be used
                continue
            images = list(shards.read(range(len(shards.texts))))
            assert len(images) == len(shards.texts)
            num_read += len(images)
    assert num_read > 200


def test_what_counts_as_shards(tmp_path: Path) -> None:
    (tmp_path / "tree" / "cat").mkdir(parents=True)
    (tmp_path / "set" / "test").mkdir(parents=True)
    (tmp_path / "set" / "test" / "0.tar").touch()
    assert find_shards(str(tmp_path / "tree")) is None
    assert find_shards(str(tmp_path / "set")) == find_shards(str(tmp_path / "set" / "test"))
    (tmp_path / "tree" / "all.tar").touch()
    (tmp_path / "set" / "train").mkdir()
    assert find_shards(str(tmp_path / "tree")) is None
    assert find_shards(str(tmp_path / "set")) == f"{tmp_path}/set/test/*.tar"
    assert find_shards("s3://bucket/{0..3}.tar") == "s3://bucket/{0..3}.tar"
    assert find_shards("absent") is None
    assert name_of("/data/wds_cars/test/{0..3}.tar") == "wds_cars"
    assert name_of("coco/captions_val2017.json") == "captions_val2017"
    assert name_of("/data/v1.0") == "v1.0"
    assert name_of("s3://bucket/cars/*.tar::s3://bucket/more/*.tar") == "cars"
