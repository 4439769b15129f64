"""Class-name files: every format, duplicates, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import open_clip
import pytest
from timm.data import ImageNetInfo

from clip_la.evaluate import wordnet
from clip_la.evaluate.classes import ClassSet, load_classes


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("file_name", "content"),
    [
        ("names.txt", "c1\ta cat\n\nd1\tbig dog\n"),
        ("names.txt", "c1\ta cat\r\nd1\tbig dog"),
        ("names.tsv", "\ufeffc1\ta cat\nd1\tbig dog\n"),
        ("names.json", '{"c1": "a cat", "d1": "big dog"}'),
        ("names.json", '[["c1", "a cat"], ["d1", "big dog"]]'),
        ("names.json", '{"0": ["c1", "a cat"], "1": ["d1", "big dog"]}'),
        ("names.csv", "c1,a cat\nd1,big dog\n"),
        ("names.csv", "Name,Folder,extra\na cat,c1,7\nbig dog,d1,8\n"),
        ("names.csv", 'wnid,label\nc1,"a cat"\n\nd1,big dog\n'),
    ],
)
def test_formats_with_folders(tmp_path: Path, file_name: str, content: str) -> None:
    classes = load_classes(write(tmp_path, file_name, content))
    assert classes.names == ("a cat", "big dog")
    assert classes.folders == ("c1", "d1")


@pytest.mark.parametrize(
    ("file_name", "content"),
    [
        ("names.txt", "  a cat\nbig dog \n"),
        ("names", "a cat\nbig dog\n"),
        ("names.json", '["a cat", "big dog"]'),
        ("names.csv", "a cat\nbig dog\n"),
        ("names.csv", "name\na cat\nbig dog\n"),
    ],
)
def test_formats_with_names_only(tmp_path: Path, file_name: str, content: str) -> None:
    classes = load_classes(write(tmp_path, file_name, content))
    assert classes.names == ("a cat", "big dog")
    assert classes.folders == (None, None)


def test_wordnet_ids_get_names(tmp_path: Path) -> None:
    text = "n02012849\nn03126707 a tall crane\nn01440764\ttench, Tinca tinca\nn00004475\n"
    classes = load_classes(write(tmp_path, "ids.txt", text))
    assert classes.folders == ("n02012849", "n03126707", "n01440764", "n00004475")
    assert classes.names == ("crane bird", "a tall crane", "tench, Tinca tinca", "organism")


def test_keras_class_index(tmp_path: Path) -> None:
    content = json.dumps({"1": ["n01443537", "goldfish"], "0": ["n01440764", "tench"]})
    classes = load_classes(write(tmp_path, "imagenet_class_index.json", content))
    assert dict(zip(classes.folders, classes.names, strict=True)) == {
        "n01443537": "goldfish",
        "n01440764": "tench",
    }


def test_imagenet_1k_pairs_ids_with_their_own_names() -> None:
    classes = load_classes("imagenet-1k")
    assert len(classes) == 1000
    assert classes.num_duplicate_names == 4  # missile and sunglasses, twice each
    names = dict(zip(classes.folders, classes.names, strict=True))
    assert (names["n02012849"], names["n03126707"]) == ("crane bird", "construction crane")
    info = ImageNetInfo("imagenet-1k")
    sharing_a_word = sum(
        bool(
            set(name.lower().split())
            & set(info.label_name_to_description(wnid).lower().replace(",", " ").split())
        )
        for wnid, name in names.items()
    )
    assert sharing_a_word > 850


@pytest.mark.parametrize(("release", "num_classes"), [("imagenet-21k-p", 11221), ("imagenet-22k", 21841)])
def test_larger_releases(release: str, num_classes: int) -> None:
    classes = load_classes(release)
    names = dict(zip(classes.folders, classes.names, strict=True))
    assert len(classes) == len(names) == num_classes
    assert names["n02012849"] == "crane bird"
    assert classes.num_duplicate_names > 100


def test_openclips_own_list_keeps_its_ids(tmp_path: Path) -> None:
    classes = load_classes(write(tmp_path, "names.txt", "\n".join(open_clip.IMAGENET_CLASSNAMES)))
    assert classes.folders == tuple(wordnet.imagenet_1k())
    assert classes.hash == load_classes("imagenet-1k").hash


def test_a_name_repeated_without_folders_is_one_class(tmp_path: Path) -> None:
    classes = load_classes(write(tmp_path, "names.txt", "crane\nheron\ncrane\n"))
    assert classes.names == ("crane", "heron")
    assert classes.num_duplicate_names == 1


def test_a_name_of_two_folders_stays_two_classes(tmp_path: Path) -> None:
    classes = load_classes(write(tmp_path, "names.txt", "bird\tcrane\nmachine\tcrane\nb\theron\n"))
    assert classes.names == ("crane", "crane", "heron")
    assert classes.num_duplicate_names == 2


def test_hash_is_of_the_names_in_any_order(tmp_path: Path) -> None:
    one = load_classes(write(tmp_path, "one.txt", "cat\ndog\n"))
    other = load_classes(write(tmp_path, "other.json", '{"d": "dog", "c": "cat"}'))
    third = load_classes(write(tmp_path, "third.txt", "cat\ndogs\n"))
    assert one.hash == other.hash != third.hash


@pytest.mark.parametrize(
    ("file_name", "content", "message"),
    [
        ("a.txt", "", "no class in it"),
        ("a.txt", "cat\n \n\tdog\n", "line 3: the folder is empty"),
        ("a.txt", "c\tcat\td\n", "line 1: expected a name, or a folder and a name"),
        ("a.txt", "c\tcat\nc\tdog\n", "line 2: folder 'c' was given at line 1"),
        ("a.txt", "cat\tn01440764\n", "expected `folder<TAB>name`, in that order"),
        ("a.txt", "n99999999\n", "no WordNet id n99999999"),
        ("a.txt", b"caf\xe9\n", "not UTF-8"),
        ("a.json", "{", "not JSON"),
        ("a.json", '"cat"', "expected a JSON object or list; found str"),
        ("a.json", '{"cat": 0}', "expected a name, or a folder and a name"),
        ("a.json", '{"c": "cat", "c": "dog"}', "keys given more than once: 'c'"),
        ("a.json", '["cat", ["c", "dog", "e"]]', "item 1: expected a name"),
        ("a.csv", "folder,name\nc,cat\nd\n", "row 3 has 1 column"),
        ("a.csv", "c,cat,7\n", "row 1: expected a name"),
    ],
)
def test_refused_files(tmp_path: Path, file_name: str, content: str | bytes, message: str) -> None:
    path = write(tmp_path, file_name, content)
    with pytest.raises(ValueError, match=message) as error:
        load_classes(path)
    assert str(path) in str(error.value)


def test_refused_paths(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"or imagenet-1k or .*; found nothing at .*absent"):
        load_classes(tmp_path / "absent.txt")
    with pytest.raises(ValueError, match="a folder at"):
        load_classes(tmp_path)


def test_length_is_the_number_of_classes() -> None:
    assert len(ClassSet(("a", "b"), (None, None), "test")) == 2
