"""The generated demo set: deterministic, true to its captions, and honest about what is held out."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest
import webdataset
from PIL import Image

from clip_la.data.demo import DemoDataError, DemoOptions, build_demo_data
from clip_la.data.demo_render import render
from clip_la.data.demo_scene import (
    COLOURS,
    HELD_OUT,
    SHAPES,
    TRAINED,
    sample_scene,
    sample_single,
    write_caption,
)

SMALL = DemoOptions(num_pairs=40, num_val_pairs=8, images_per_class=1, image_size=32)


@pytest.fixture(scope="module")
def demo_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "set"
    assert build_demo_data(folder, SMALL, progress=False)
    return folder


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_same_options_same_bytes_other_seed_other_bytes(demo_set: Path, tmp_path: Path) -> None:
    build_demo_data(tmp_path / "again", SMALL, progress=False)
    assert digests(tmp_path / "again") == digests(demo_set)
    other = DemoOptions(**{**vars(SMALL), "seed": 1})
    build_demo_data(tmp_path / "other", other, progress=False)
    assert digests(tmp_path / "other")["train/00000.tar"] != digests(demo_set)["train/00000.tar"]


def test_every_colour_and_shape_is_trained_and_no_held_out_combination_is() -> None:
    assert len(HELD_OUT) == 48
    assert not set(HELD_OUT) & set(TRAINED)
    assert {colour for colour, _ in TRAINED} == set(COLOURS)
    assert {shape for _, shape in TRAINED} == set(SHAPES)
    rng = random.Random(0)
    seen = {thing.combination for _ in range(5000) for thing in sample_scene(rng).things}
    assert seen == set(TRAINED)


def test_captions_say_what_is_in_the_scene() -> None:
    rng = random.Random(1)
    for _ in range(500):
        scene = sample_scene(rng)
        caption = write_caption(scene, rng)
        assert all(f"{thing.colour} {thing.shape}" in caption for thing in scene.things)
        assert (scene.relation or "") in caption
        if len(scene.things) == 2:
            first, second = scene.things
            assert caption.index(f"{first.colour} {first.shape}") < caption.index(
                f"{second.colour} {second.shape}"
            )
            moved = {"above": first.y < second.y, "below": first.y > second.y}
            moved |= {"to the left of": first.x < second.x, "to the right of": first.x > second.x}
            assert scene.relation is not None
            assert moved[scene.relation]


def test_the_picture_shows_the_colour() -> None:
    for colour, shape in TRAINED:
        if shape in ("moon", "hourglass"):
            continue  # hollow or thin at the centre
        scene = sample_single(random.Random(2), (colour, shape))
        thing = scene.things[0]
        pixel = render(scene, 64).getpixel((round(64 * thing.x), round(64 * thing.y)))
        assert isinstance(pixel, tuple)
        assert all(abs(a - b) <= 15 for a, b in zip(pixel, COLOURS[colour], strict=True)), (colour, shape)


def test_layout_is_img2datasets_and_webdataset_reads_it(demo_set: Path) -> None:
    sizes = json.loads((demo_set / "train" / "sizes.json").read_text())
    assert sizes == {f"{shard:05d}.tar": 5 for shard in range(8)}
    samples = list(webdataset.WebDataset(str(demo_set / "train" / "00003.tar"), shardshuffle=False))
    assert len(samples) == 5
    for sample in samples:
        assert {"jpg", "txt", "json"} <= set(sample)
        assert json.loads(sample["json"])["caption"] == sample["txt"].decode()
    assert len({sample["__key__"] for sample in samples}) == 5
    assert json.loads((demo_set / "val" / "sizes.json").read_text()) == {"00000.tar": 8}


def test_zero_shot_tree_holds_exactly_the_held_out_combinations(demo_set: Path) -> None:
    tree = demo_set / "zeroshot"
    folders = sorted(path.name for path in tree.iterdir() if path.is_dir())
    names = (tree / "classnames.txt").read_text().splitlines()
    assert names == [folder.replace("_", " ") for folder in folders]
    assert sorted(tuple(name.split(" ")) for name in names) == sorted(HELD_OUT)
    assert Image.open(next((tree / folders[0]).iterdir())).size == (32, 32)


def test_run_again_does_nothing_and_other_options_are_refused(demo_set: Path) -> None:
    before = digests(demo_set)
    assert not build_demo_data(demo_set, SMALL, progress=False)
    assert digests(demo_set) == before
    with pytest.raises(DemoDataError, match="holds a demo set with other num_pairs"):
        build_demo_data(demo_set, DemoOptions(**{**vars(SMALL), "num_pairs": 48}), progress=False)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(DemoDataError, match="is not a demo set"):
        build_demo_data(tmp_path, SMALL, progress=False)
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("clip_la.data.demo._write_set", fail)
    with pytest.raises(KeyboardInterrupt):
        build_demo_data(tmp_path / "set", SMALL, progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"num_pairs": 7}, {"image_size": 8}, {"seed": -1}])
def test_impossible_options_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(DemoDataError, match="expected at least"):
        DemoOptions(**wrong)
