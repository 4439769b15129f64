"""Folders to classes: by name or WordNet id, never by position; everything that doesn't fit is listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from clip_la.evaluate.classes import ClassSet, load_classes
from clip_la.evaluate.mapping import FolderMapping, map_folders, normalise_name


def classes(*names: str, folders: tuple[str | None, ...] | None = None) -> ClassSet:
    return ClassSet(names, folders or (None,) * len(names), "names.txt")


def named(mapping: FolderMapping, class_set: ClassSet) -> dict[str, str]:
    return {folder: class_set.names[index] for folder, index in mapping.class_of.items()}


def test_order_does_not_matter() -> None:
    class_set = classes("zebra", "ant", "cat")
    mapping = map_folders(["ant", "cat", "zebra"], class_set)
    assert named(mapping, class_set) == {"ant": "ant", "cat": "cat", "zebra": "zebra"}


@pytest.mark.parametrize("folder", ["auto_rickshaw", "Auto Rickshaw", "AUTO-rickshaw", "auto__rickshaw "])
def test_spelling_of_folders(folder: str) -> None:
    class_set = classes("ant", "auto rickshaw")
    assert named(map_folders([folder, "ant"], class_set), class_set)[folder] == "auto rickshaw"


def test_unicode_forms_of_a_name_are_equal() -> None:
    assert normalise_name("cafe\u0301") == normalise_name("CAF\u00c9")


def test_names_that_differ_in_case_only_map_exactly() -> None:
    class_set = classes("march", "March")
    assert map_folders(["March", "march"], class_set).class_of == {"March": 1, "march": 0}
    with pytest.raises(ValueError, match=r"MARCH \('march' or 'March'\)"):
        map_folders(["MARCH"], class_set, allow_missing_classes=True)


def test_stated_folder_comes_before_name() -> None:
    class_set = classes("b", "a", folders=("a", "b"))
    assert map_folders(["a", "b"], class_set).class_of == {"a": 0, "b": 1}


def test_stated_numeric_folders_are_accepted() -> None:
    class_set = classes("zero", "one", folders=("0", "1"))
    assert map_folders(["1", "0"], class_set).class_of == {"1": 1, "0": 0}


def test_numeric_folders_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 folder\(s\) are mere numbers.*0, 1, 2"):
        map_folders(["0", "1", "2"], classes("tench", "goldfish", "shark"))


def test_wordnet_ids_against_ids() -> None:
    class_set = load_classes("imagenet-1k")
    folders = ["n04356056", "n01440764", "n03126707"]
    mapping = map_folders(folders, class_set, allow_missing_classes=True)
    assert named(mapping, class_set) == dict(
        zip(folders, ("sunglasses", "tench", "construction crane"), strict=True)
    )
    assert len(mapping.missing_classes) == 997


def test_wordnet_ids_against_names_only() -> None:
    class_set = classes("great white shark", "Carassius auratus", "crane bird")
    mapping = map_folders(["n02012849", "n01443537", "n01484850"], class_set)
    assert mapping.class_of == {"n02012849": 2, "n01443537": 1, "n01484850": 0}


def test_two_ids_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"several folders: 'crane' \(n02012849, n03126707\)"):
        map_folders(["n02012849", "n03126707"], classes("crane"))


def test_three_wordnet_folders_are_not_the_first_three_of_1000() -> None:
    with pytest.raises(ValueError, match=r"997 class\(es\) have no folder.*--allow-missing-classes"):
        map_folders(["n04356056", "n01440764", "n03126707"], load_classes("imagenet-1k"))


def test_unknown_folder_is_refused_with_a_near_name() -> None:
    with pytest.raises(ValueError, match=r"1 folder\(s\) are no class: goldfisch \(near 'goldfish'\)"):
        map_folders(["tench", "goldfisch"], classes("tench", "goldfish"))


def test_unknown_folders_can_be_left_out() -> None:
    mapping = map_folders(["tench", "0", "train"], classes("tench"), allow_unknown_folders=True)
    assert mapping == FolderMapping({"tench": 0}, (), ("0", "train"))


def test_missing_classes_can_be_accepted() -> None:
    mapping = map_folders(["dog"], classes("cat", "dog", "eel"), allow_missing_classes=True)
    assert mapping == FolderMapping({"dog": 1}, (0, 2), ())


def test_two_folders_of_one_class_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"1 class\(es\) have several folders: 'big dog' \(big_dog, Big dog\)"
    ):
        map_folders(["big_dog", "Big dog"], classes("big dog"))


def test_two_classes_of_one_name_need_stated_folders() -> None:
    class_set = classes("crane", "crane", folders=("n02012849", "n03126707"))
    assert map_folders(["n03126707", "n02012849"], class_set).class_of == {"n03126707": 1, "n02012849": 0}
    with pytest.raises(
        ValueError, match=r"crane \('crane' of folder n02012849 or 'crane' of folder n03126707\)"
    ):
        map_folders(["crane"], class_set, allow_missing_classes=True)


def test_everything_wrong_is_in_one_message_and_long_lists_are_cut() -> None:
    folders = ["7", *(f"unknown{i}" for i in range(30)), "b_b", "b-b"]
    with pytest.raises(ValueError, match=r"33 folders don't fit the 2 classes of names.txt") as error:
        map_folders(folders, classes("b b", "c"))
    lines = str(error.value).splitlines()
    assert len(lines) == 5
    assert "unknown9" in str(error.value)
    assert "unknown10" not in str(error.value)
    assert "and 20 more" in str(error.value)


def test_no_folder_fits_even_when_all_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"no folder is a class"):
        map_folders(["x"], classes("cat"), allow_missing_classes=True, allow_unknown_folders=True)


@pytest.mark.parametrize(("tree", "num_classes"), [("emoji_fluent", 250), ("emoji_group_openmoji", 20)])
def test_shared_trees(shared_data: Path, tree: str, num_classes: int) -> None:
    root = shared_data / "zeroshot" / tree
    class_set = load_classes(root / "classnames.txt")
    folders = sorted(path.name for path in root.iterdir() if path.is_dir())
    mapping = map_folders(folders[::-1], class_set)
    assert len(class_set) == num_classes
    assert named(mapping, class_set) == {folder: folder.replace("_", " ") for folder in folders}
