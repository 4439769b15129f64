"""Prompt templates: named sets as in OpenCLIP, files, and what is refused."""

from __future__ import annotations

from pathlib import Path

import open_clip
import pytest

from clip_la.evaluate.templates import TEMPLATE_SETS, load_templates


@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("openai-80", open_clip.OPENAI_IMAGENET_TEMPLATES),
        ("simple-7", open_clip.SIMPLE_IMAGENET_TEMPLATES),
    ],
)
def test_openclips_sets(name: str, functions: tuple) -> None:
    assert load_templates(name).prompts("red {} fox") == [function("red {} fox") for function in functions]


@pytest.mark.parametrize("name", TEMPLATE_SETS)
def test_every_set_has_one_place_for_the_name(name: str) -> None:
    assert all(text.count("{}") == 1 for text in load_templates(name).texts)


def test_hash_tells_sets_apart() -> None:
    assert len({load_templates(name).hash for name in TEMPLATE_SETS}) == len(TEMPLATE_SETS)


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "templates.txt"
    path.write_text("\n a photo of a {}.\n\n{}\n")
    templates = load_templates(path)
    assert templates.prompts("cat") == ["a photo of a cat.", "cat"]
    assert templates.name == str(path)


def test_a_file_with_the_lines_of_a_set_has_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "templates.txt"
    path.write_text("\n".join(load_templates("simple-7").texts))
    assert load_templates(path).hash == load_templates("simple-7").hash


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a photo of a {}.\na photo of a cat.\n", "line 2: expected exactly one {}.*found 0"),
        ("{} and {}\n", "line 1.*found 2"),
        ("a photo of a {name}.\n", "line 1.*found 0"),
        ("{c} and {}\n", "line 1.*found 2"),
        (" \n", "has no template"),
    ],
)
def test_refused_files(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "templates.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_templates(path)


def test_unknown_name() -> None:
    with pytest.raises(
        ValueError, match="openai-81 is neither one of openai-80, simple-7, photo, plain nor a file"
    ):
        load_templates("openai-81")


def test_clip_benchmarks_placeholder(tmp_path: Path) -> None:
    path = tmp_path / "zeroshot_classification_templates.txt"
    path.write_text("a photo of a {c}.\n{c}\n")
    assert load_templates(path).texts == ("a photo of a {}.", "{}")
