"""Text features are built once; an evaluation that was killed continues, to the last count."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_clip import ToyClip, tokenize, toy_bundle
from toy_tree import make_tree

from clip_la.evaluate.cache import EvaluationCache, default_folder, hash_of_model, hash_of_text
from clip_la.evaluate.journal import Journal
from clip_la.evaluate.tally import Answers
from clip_la.evaluate.templates import Templates
from clip_la.evaluate.zeroshot import ZeroShot

COUNTS = {"zebra": 9, "kite": 4, "hat": 7, "apple": 5}
TEMPLATES = Templates("two", ("a {}", "the {}"))


class CountingClip(ToyClip):
    """Counts what it encodes, and gives up after some batches of images."""

    def __init__(self, max_batches: float = float("inf")) -> None:
        super().__init__()
        self.num_texts = self.num_images = 0
        self.batches_left = max_batches

    def encode_text(self, tokens: Tensor) -> Tensor:
        self.num_texts += len(tokens)
        return super().encode_text(tokens)

    def encode_image(self, images: Tensor) -> Tensor:
        if self.batches_left == 0:
            raise RuntimeError("interrupted")
        self.batches_left -= 1
        self.num_images += len(images)
        return super().encode_image(images)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = make_tree(tmp_path / "tree", COUNTS)
    (tree / "hat" / "broken.png").write_bytes(b"")
    return tree


@pytest.fixture
def cache(tmp_path: Path) -> EvaluationCache:
    return EvaluationCache(tmp_path / "cache")


def zero_shot(tree: Path, cache: EvaluationCache | None, **options: Any) -> ZeroShot:
    return ZeroShot(tree, templates="simple-7", batch_size=4, workers=0, cache=cache, **options)


def test_text_features_are_built_once(tree: Path, cache: EvaluationCache) -> None:
    first, second, without = CountingClip(), CountingClip(), CountingClip()
    expected = zero_shot(tree, None).run(toy_bundle(without))
    assert zero_shot(tree, cache).run(toy_bundle(first)) == expected
    assert zero_shot(tree, cache).run(toy_bundle(second)) == expected
    assert (first.num_texts, second.num_texts, without.num_texts) == (28, 0, 28)
    assert second.num_images == first.num_images == 25


def test_the_key_is_of_all_that_features_depend_on() -> None:
    bundle = toy_bundle()
    names = ["cat", "dog"]
    key = hash_of_text(bundle, names, TEMPLATES)
    assert key == hash_of_text(toy_bundle(), names, TEMPLATES)
    other_weights = toy_bundle()
    with torch.no_grad():
        other_weights.model.get_parameter("logit_scale").add_(1e-6)

    def other_tokenizer(texts: str | list[str]) -> Tensor:
        return tokenize(texts) + 1

    others = [
        hash_of_text(bundle, names[::-1], TEMPLATES),
        hash_of_text(bundle, ["cat", "do", "g"], TEMPLATES),
        hash_of_text(bundle, names, Templates("two", ("a {}", "some {}"))),
        hash_of_text(other_weights, names, TEMPLATES),
        hash_of_text(replace(bundle, tokenizer=other_tokenizer), names, TEMPLATES),
        hash_of_text(replace(bundle, precision="bf16"), names, TEMPLATES),
        hash_of_text(replace(bundle, model_config={"attention": {"kind": "eq7"}}), names, TEMPLATES),
    ]
    assert len({key, *others}) == 8


def test_weights_of_every_dtype_and_shape_are_hashed() -> None:
    bundle = toy_bundle()
    bundle.model.register_buffer("transposed", torch.ones(2, 3, dtype=torch.bfloat16).T)
    bundle.model.register_buffer("flag", torch.tensor(True))
    before = hash_of_model(bundle)
    bundle.model.get_buffer("transposed")[0, 1] = 2
    assert hash_of_model(bundle) != before


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other"])
def test_a_damaged_file_is_made_again(
    tree: Path, cache: EvaluationCache, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = zero_shot(tree, cache).run(toy_bundle())
    (file,) = (tmp_path / "cache" / "text").iterdir()
    content = file.read_bytes()
    middle = content.rindex(torch.load(file)["features"].numpy().tobytes()[:16])
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    file.write_bytes({"cut": content[:-40], "flipped": flipped, "empty": b"", "other": b"x"}[damage])
    model = CountingClip()
    with caplog.at_level(logging.WARNING):
        assert zero_shot(tree, cache).run(toy_bundle(model)) == expected
    assert model.num_texts == 28
    assert "text features are computed again" in caplog.text
    assert torch.equal(torch.load(file)["features"], cache.load_text(file.stem))  # type: ignore[arg-type]


def test_a_cache_that_cannot_be_written_is_done_without(
    tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        metrics = zero_shot(tree, EvaluationCache(tmp_path / "file")).run(toy_bundle())
    assert metrics == zero_shot(tree, None).run(toy_bundle())
    assert "text features are not kept" in caplog.text
    assert caplog.text.count("will start again from nothing") == 1


def test_what_was_used_longest_ago_is_removed(tmp_path: Path) -> None:
    EvaluationCache(tmp_path / "other").save_text("a", torch.zeros(500))
    size = (tmp_path / "other" / "text" / "a.pt").stat().st_size
    cache = EvaluationCache(tmp_path, max_text_bytes=4 * size)
    for age, key in enumerate("abcd"):
        cache.save_text(key, torch.zeros(500))
        os.utime(tmp_path / "text" / f"{key}.pt", (age, age))
    assert cache.load_text("a") is not None  # used just now
    cache.save_text("e", torch.zeros(500))
    assert {path.stem for path in (tmp_path / "text").iterdir()} == {"a", "c", "d", "e"}


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CLIP_LA_CACHE", raising=False)
    assert default_folder() == tmp_path / "clip_la"
    monkeypatch.setenv("CLIP_LA_CACHE", "/somewhere")
    assert default_folder() == Path("/somewhere")


@pytest.mark.parametrize("num_batches", [1, 3, 6])
def test_an_interrupted_evaluation_continues(
    tree: Path, cache: EvaluationCache, tmp_path: Path, num_batches: int
) -> None:
    expected = zero_shot(tree, None).evaluate(toy_bundle())
    with pytest.raises(RuntimeError, match="interrupted"):
        zero_shot(tree, cache).run(toy_bundle(CountingClip(num_batches)))
    model = CountingClip()
    result = zero_shot(tree, cache).evaluate(toy_bundle(model))
    assert result.metrics() == expected.metrics()
    assert result.tally.confusions == expected.tally.confusions
    assert result.tally.unreadable == expected.tally.unreadable
    assert 0 < model.num_images <= 26 - 4 * num_batches
    assert not list((tmp_path / "cache" / "partial").iterdir())


def test_what_was_left_alone_for_a_month_is_removed(cache: EvaluationCache, tmp_path: Path) -> None:
    for key, days in (("old", 31), ("new", 29), ("mine", 31)):
        journal = cache.journal(key)
        journal.append(Answers(0, [0], [0], [0], []))
        journal.close()
        folder = tmp_path / "cache" / "partial" / key
        for path in (folder / "rank-0.jsonl", folder):
            os.utime(path, (time.time() - days * 86400,) * 2)
    assert cache.journal("mine").read().keys() == {0}
    assert {path.name for path in (tmp_path / "cache" / "partial").iterdir()} == {"new", "mine"}


@pytest.mark.parametrize(
    "change", ["weights", "batch size", "images", "classes", "label"], ids=lambda name: name.replace(" ", "-")
)
def test_another_evaluation_starts_from_nothing(tree: Path, cache: EvaluationCache, change: str) -> None:
    with pytest.raises(RuntimeError, match="interrupted"):
        zero_shot(tree, cache).run(toy_bundle(CountingClip(2)))
    model = CountingClip()
    if change == "weights":
        torch.nn.init.ones_(model.logit_scale)
    elif change == "images":
        (tree / "hat" / "new.png").write_bytes((tree / "hat" / "000.png").read_bytes())
    elif change == "classes":
        (tree / "classnames.txt").write_text("zebra\nkite\nhat\napple\nyak")
    elif change == "label":
        (tree / "hat" / "006.png").rename(tree / "apple" / "005.png")
    evaluator = zero_shot(tree, cache, allow_missing_classes=True)
    if change == "batch size":
        evaluator = ZeroShot(tree, templates="simple-7", batch_size=5, workers=0, cache=cache)
    evaluator.run(toy_bundle(model))
    assert model.num_images == 25 + (change == "images")


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    answers = [Answers(batch, [1, 2], [1, 0], [0, 3], ["a\u2028b: \udce9"]) for batch in range(3)]
    journal = Journal(tmp_path / "j")
    for item in answers:
        journal.append(item)
    journal.close()
    file = tmp_path / "j" / "rank-0.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[1], "what?", lines[2], lines[2], lines[3][:-2]]))
    again = Journal(tmp_path / "j")
    assert again.read() == {0: answers[0], 1: answers[1]}
    again.append(answers[2])
    again.close()
    assert again.read() == {0: answers[0], 1: answers[1], 2: answers[2]}


class SlowClip(CountingClip):
    def encode_image(self, images: Tensor) -> Tensor:
        time.sleep(0.05)
        return super().encode_image(images)


def evaluate_slowly(tree: Path, cache: EvaluationCache, connection: Connection) -> None:
    torch.set_num_threads(1)
    model = SlowClip()
    metrics = ZeroShot(tree, templates="plain", batch_size=1, workers=0, cache=cache).run(toy_bundle(model))
    connection.send((metrics, model.num_images))


def start(tree: Path, cache: EvaluationCache) -> tuple[ForkProcess, Connection]:
    context = multiprocessing.get_context("fork")  # spawned, it would spend seconds on its imports
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=evaluate_slowly, args=(tree, cache, sender))
    process.start()
    sender.close()
    return process, receiver


def test_a_killed_evaluation_continues(tree: Path, cache: EvaluationCache, tmp_path: Path) -> None:
    process, receiver = start(tree, cache)
    file = wait_for_lines(tmp_path / "cache" / "partial", 5, process)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(EOFError):
        receiver.recv()
    num_done = len(Journal(file.parent).read())
    assert 4 <= num_done < 26

    process, receiver = start(tree, cache)
    metrics, num_images = receiver.recv()
    process.join()

    assert metrics == ZeroShot(tree, templates="plain", batch_size=1, workers=0).run(toy_bundle())
    num_unreadable_done = int(num_done > COUNTS["apple"] + COUNTS["hat"])
    assert num_images == 25 - num_done + num_unreadable_done
    assert not file.exists()


def wait_for_lines(folder: Path, count: int, process: ForkProcess) -> Path:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.is_alive():
        for file in folder.glob("*/rank-0.jsonl"):
            if file.read_text().count("\n") > count:
                return file
        time.sleep(0.01)
    raise AssertionError("the evaluation wrote no journal")
