"""Zero-shot over image folders: counts against brute force, what is left out and what is refused."""

from __future__ import annotations

import csv
import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from torch import Tensor
from toy_clip import ToyClip, to_tensor, tokenize, toy_bundle
from toy_shards import shards_of_tree
from toy_tree import make_tree

from clip_la.bundle import build, resolve_model_config
from clip_la.evaluate.classes import load_classes
from clip_la.evaluate.features import encode_class_names
from clip_la.evaluate.images import FolderImages
from clip_la.evaluate.shards import ShardImages
from clip_la.evaluate.templates import load_templates
from clip_la.evaluate.zeroshot import ZeroShot

COUNTS = {"zebra": 9, "kite": 4, "hat": 7, "green_apple": 5, "crane": 1, "bottle": 3, "Old-Car": 6}
NAMES = ("old car", "bottle", "crane", "green apple", "hat", "kite", "zebra")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "tree", COUNTS)


def evaluator(tree: Path, **options: object) -> ZeroShot:
    settings = {"templates": "simple-7", "batch_size": 4, "workers": 0, **options}
    return ZeroShot(tree, settings.pop("classnames", tree / "classnames.txt"), **settings)  # type: ignore[arg-type]


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def brute_force_positions(tree: Path, names: tuple[str, ...], templates: str) -> dict[str, list[int]]:
    """For each folder, how many classes beat the true one, an image; in float64, one image at a time."""
    prompts = [load_templates(templates).prompts(name) for name in names]
    weights = [unit(unit(tokenize(texts).double().numpy() / 255 - 0.3).mean(axis=0)) for texts in prompts]
    positions = {}
    for folder in sorted(path for path in tree.iterdir() if path.is_dir()):
        label = names.index(folder.name.lower().replace("_", " ").replace("-", " "))
        positions[folder.name] = []
        for path in sorted(folder.glob("*.png")):
            pixels = np.asarray(Image.open(path), dtype=np.float64) / 255
            scores = np.stack(weights) @ unit(pixels.mean(axis=(0, 1)) - 0.3)
            positions[folder.name].append(int((scores > scores[label]).sum()))
    return positions


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_counts_equal_brute_force(tree: Path, batch_size: int, workers: int) -> None:
    positions = brute_force_positions(tree, NAMES, "simple-7")
    everything = [position for own in positions.values() for position in own]

    metrics = evaluator(tree, batch_size=batch_size, workers=workers).run(toy_bundle())

    assert metrics["num_images"] == len(everything) == sum(COUNTS.values())
    assert metrics["num_top1"] == everything.count(0)
    assert metrics["num_top5"] == sum(position < 5 for position in everything)
    assert 0 < metrics["top1"] == everything.count(0) / len(everything) < metrics["top5"] < 1
    shares = [own.count(0) / len(own) for own in positions.values()]
    assert metrics["mean_per_class"] == pytest.approx(sum(shares) / len(shares))
    assert metrics["top1_low"] < metrics["top1"] < metrics["top1_high"]
    assert metrics["chance"] == pytest.approx(1 / 7)
    assert (metrics["num_classes"], metrics["num_unreadable"], metrics["num_classes_without_images"]) == (
        7,
        0,
        0,
    )
    assert metrics["templates"] == "simple-7"


def test_order_of_the_class_file_changes_nothing(tree: Path, tmp_path: Path) -> None:
    shuffled = tmp_path / "shuffled.txt"
    shuffled.write_text("\n".join(NAMES[::-1]))
    one, other = (evaluator(tree, **given).run(toy_bundle()) for given in ({}, {"classnames": shuffled}))
    assert (one.pop("class_list"), other.pop("class_list")) == (str(tree / "classnames.txt"), str(shuffled))
    assert one == other


def test_renamed_folders_keep_their_images(tree: Path, tmp_path: Path) -> None:
    before = evaluator(tree).run(toy_bundle())
    (tree / "zebra").rename(tree / "z1")
    (tree / "kite").rename(tree / "a9")
    names = tmp_path / "names.tsv"
    names.write_text(
        "z1\tzebra\na9\tkite\n" + "".join(f"{n}\t{n}\n" for n in NAMES if n not in ("zebra", "kite"))
    )
    after = evaluator(tree, classnames=names).run(toy_bundle())
    changed = {"class_list": None, "class_list_hash": None}
    assert {**after, **changed} == {**before, **changed}


def test_templates_matter_and_are_recorded(tree: Path) -> None:
    seven, plain = (evaluator(tree, templates=name).evaluate(toy_bundle()) for name in ("simple-7", "plain"))
    assert seven.metrics()["templates_hash"] != plain.metrics()["templates_hash"]
    assert seven.tally.confusions != plain.tally.confusions


@pytest.mark.parametrize("workers", [0, 2])
def test_leaves_mode_and_random_state_alone(tree: Path, workers: int) -> None:
    model = ToyClip().train()
    state = torch.get_rng_state()
    evaluator(tree, workers=workers).run(toy_bundle(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.modes_seen == {False}
    assert model.training


def test_unreadable_images_are_counted_named_and_left_out(
    tree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without = evaluator(tree).run(toy_bundle())
    (tree / "kite" / "broken.jpg").write_bytes(b"\xff\xd8 not a picture")
    (tree / "hat" / "empty.JPEG").write_bytes(b"")
    (tree / "hat" / "page.png").write_bytes(b"<html>404</html>")
    with caplog.at_level(logging.WARNING):
        metrics = evaluator(tree, workers=1).run(toy_bundle())
    assert metrics == {**without, "num_unreadable": 3}
    assert "3 of 38 images" in caplog.text
    assert "broken.jpg" in caplog.text


def test_all_unreadable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tree" / "kite").mkdir(parents=True)
    (tmp_path / "tree" / "kite" / "a.png").write_bytes(b"")
    (tmp_path / "names.txt").write_text("kite")
    with pytest.raises(ValueError, match=r"1 of 1 images of .* could not be read:\n.*a\.png"):
        evaluator(tmp_path / "tree", classnames=tmp_path / "names.txt").run(toy_bundle())


def test_class_without_images_is_stated_and_not_in_the_mean(tree: Path) -> None:
    before = evaluator(tree).evaluate(toy_bundle())
    for path in (tree / "zebra").iterdir():
        path.unlink()
    after = evaluator(tree).evaluate(toy_bundle()).metrics()
    shares = (before.tally.num_top1 / before.tally.num_images).tolist()
    shares.pop(NAMES.index("zebra"))
    assert after["num_classes_without_images"] == 1
    assert after["num_classes"] == 7
    assert after["mean_per_class"] == pytest.approx(sum(shares) / 6)


def test_missing_class_stays_a_possible_answer(tree: Path) -> None:
    before = evaluator(tree).evaluate(toy_bundle())
    for path in (tree / "zebra").iterdir():
        path.unlink()
    (tree / "zebra").rmdir()
    with pytest.raises(ValueError, match=r"1 class\(es\) have no folder: 'zebra'"):
        evaluator(tree)
    after = evaluator(tree, allow_missing_classes=True).evaluate(toy_bundle())
    assert after.metrics()["num_missing_classes"] == 1
    others = [index for index, name in enumerate(NAMES) if name != "zebra"]
    assert after.tally.num_top1[others].tolist() == before.tally.num_top1[others].tolist()


def test_unknown_folder(tree: Path) -> None:
    (tree / "sebra").mkdir()
    with pytest.raises(ValueError, match=r"no class: sebra \(near 'zebra'\)"):
        evaluator(tree)
    assert evaluator(tree, allow_unknown_folders=True).run(toy_bundle())["num_unknown_folders"] == 1


def test_classes_of_one_name_tie_and_the_first_wins(tree: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.tsv"
    names.write_text("".join(f"{folder}\t{'kite' if folder == 'hat' else folder}\n" for folder in COUNTS))
    result = evaluator(tree, classnames=names, templates="plain").evaluate(toy_bundle())
    kite, hat = list(COUNTS).index("kite"), list(COUNTS).index("hat")
    assert result.metrics()["num_duplicate_names"] == 2
    assert result.tally.num_top1[hat] == 0
    assert result.tally.num_top5[hat] > 0
    assert all(hat not in pair[1:] for pair in result.tally.confusions)
    assert kite < hat


def test_few_classes_have_a_top5_of_1(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", {"kite": 5, "hat": 5})
    names = tmp_path / "names.txt"
    names.write_text("kite\nhat")
    metrics = evaluator(tree, classnames=names).run(toy_bundle())
    assert metrics["top5"] == 1
    assert metrics["chance"] == 0.5


def test_images_are_found_at_any_depth_hidden_and_other_files_are_not(tree: Path) -> None:
    before = evaluator(tree).run(toy_bundle())
    (tree / "kite" / "deep" / "er").mkdir(parents=True)
    (tree / "kite" / "000.png").rename(tree / "kite" / "deep" / "er" / "000.PNG")
    (tree / "kite" / ".hidden.png").write_bytes(b"")
    (tree / "kite" / "notes.txt").write_text("no image")
    (tree / ".cache").mkdir()
    (tree / "kite" / ".thumbnails").mkdir()
    (tree / "kite" / ".thumbnails" / "001.png").write_bytes((tree / "kite" / "001.png").read_bytes())
    (tree / "kite" / "deep" / "loop").symlink_to(tree / "kite", target_is_directory=True)
    found = evaluator(tree)
    assert found.run(toy_bundle()) == {**before, "num_other_files": 1}


def test_class_csv(tree: Path, tmp_path: Path) -> None:
    path = tmp_path / "new" / "classes.csv"
    folder = evaluator(tree, per_class_csv=path)
    metrics = folder.run(toy_bundle())
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    assert [row["name"] for row in rows] == list(NAMES)
    assert {row["folder"]: int(row["num_images"]) for row in rows} == COUNTS
    assert sum(int(row["num_top1"]) for row in rows) == metrics["num_top1"]
    for row in rows:
        wrong = int(row["num_images"]) - int(row["num_top1"])
        assert bool(row["commonest_wrong_answer"]) == (wrong > 0)
        assert int(row["num_commonest_wrong_answer"]) <= wrong


def test_confusions_are_the_wrong_answers(tree: Path) -> None:
    result = evaluator(tree).evaluate(toy_bundle())
    confusions = result.confusions()
    assert (
        sum(pair.num_images for pair in confusions)
        == result.metrics()["num_images"] - result.metrics()["num_top1"]
    )
    assert [pair.num_images for pair in confusions] == sorted(
        (p.num_images for p in confusions), reverse=True
    )
    assert all(pair.true != pair.predicted for pair in confusions)


class BrokenClip(ToyClip):
    def encode_image(self, images: Tensor) -> Tensor:
        return super().encode_image(images) * float("nan")


def test_a_model_of_nans_is_refused_rather_than_scored(tree: Path) -> None:
    with pytest.raises(ValueError, match="4 of 4 image features are not finite"):
        evaluator(tree).run(toy_bundle(BrokenClip()))


def test_a_broken_transform_is_an_error_that_says_so(tree: Path) -> None:
    def failing(image: Image.Image) -> Tensor:
        raise RuntimeError("transform is broken")

    with pytest.raises(ValueError, match=r"35 of 35 images .*\n.*image_transform .*transform is broken"):
        evaluator(tree).run(toy_bundle(preprocess=failing))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, "found nothing"),
        (lambda root: root.write_text("x"), "found a file"),
        (lambda root: root.mkdir(), "has no class folders, but 0 file"),
        (lambda root: (root / "kite").mkdir(parents=True), "no images in the 1 class folders"),
    ],
)
def test_refused_trees(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    names = tmp_path / "names.txt"
    names.write_text("kite")
    make(tmp_path / "tree")
    with pytest.raises(ValueError, match=message):
        evaluator(tmp_path / "tree", classnames=names)


def test_images_beside_each_other_are_no_tree(tree: Path) -> None:
    with pytest.raises(ValueError, match=r"no class folders, but 4 file\(s\), of which 4 image"):
        evaluator(tree / "kite", classnames=tree / "classnames.txt")


def test_transparent_images_lie_on_white(tmp_path: Path) -> None:
    (tmp_path / "tree" / "kite").mkdir(parents=True)
    Image.new("RGBA", (8, 8), (200, 0, 0, 0)).save(tmp_path / "tree" / "kite" / "0.png")
    (tmp_path / "names.txt").write_text("kite")
    seen: list[Tensor] = []

    def keep(image: Image.Image) -> Tensor:
        seen.append(to_tensor(image))
        return seen[-1]

    evaluator(tmp_path / "tree", classnames=tmp_path / "names.txt").run(toy_bundle(preprocess=keep))
    assert torch.equal(seen[0], torch.ones(3, 8, 8))


@pytest.mark.parametrize("name", ["ViT-nano-8", "ViT-nano-8-LA"])
def test_a_real_model(tree: Path, name: str) -> None:
    bundle = build(resolve_model_config(name), model_name=name)
    metrics = evaluator(tree).run(bundle)
    assert metrics["num_images"] == sum(COUNTS.values())
    assert metrics == evaluator(tree).run(bundle)
    assert metrics["num_top1"] == evaluator(tree, batch_size=64).run(bundle)["num_top1"]


@pytest.mark.parametrize("name", ["ViT-nano-8", "ViT-nano-8-LA"])
def test_class_features_are_openclips(name: str) -> None:
    bundle = build(resolve_model_config(name), model_name=name)
    bundle.model.eval()
    expected = open_clip.build_zero_shot_classifier(
        bundle.model, bundle.tokenizer, NAMES, open_clip.OPENAI_IMAGENET_TEMPLATES
    )
    features = encode_class_names(bundle, NAMES, load_templates("openai-80"), num_prompts_at_once=170)
    assert torch.allclose(features, expected.T, atol=1e-5)


def test_prompts_are_made_a_few_classes_at_a_time() -> None:
    sizes: list[int] = []

    def counting_tokenizer(texts: str | list[str]) -> Tensor:
        sizes.append(len(texts))
        return tokenize(texts)

    bundle = replace(toy_bundle(), tokenizer=counting_tokenizer)
    names = [f"thing {index}" for index in range(1000)]
    features = encode_class_names(bundle, names, load_templates("openai-80"))
    assert features.shape == (1000, 3)
    assert max(sizes) <= 256
    assert sum(sizes) == 80 * 1000


def test_sources_can_be_handed_to_processes_that_do_not_fork(tree: Path, tmp_path: Path) -> None:
    shards = ShardImages(shards_of_tree(tree, tmp_path / "shards", str, sizes=(10**6,)))
    for source in (FolderImages(tree), shards):
        again = pickle.loads(pickle.dumps(source))
        assert [image.data for image in again.read([0, 5])] == [image.data for image in source.read([0, 5])]


def test_22k_classes(tmp_path: Path) -> None:
    """Mapping, counting and the rows of a class list of that size, of which three classes have images."""
    ids = list(load_classes("imagenet-22k").folders)
    tree = make_tree(tmp_path / "tree", {str(ids[place]): 2 for place in (0, 9000, 21_840)})
    evaluator = ZeroShot(tree, "imagenet-22k", "plain", workers=0, allow_missing_classes=True)
    result = evaluator.evaluate(toy_bundle())
    assert result.metrics()["num_missing_classes"] == 21_838
    assert result.metrics()["num_duplicate_names"] > 1000
    rows = result.class_rows()
    assert [row.index for row in rows if row.num_images] == [0, 9000, 21_840]
    assert all(row.definition for row in rows)
