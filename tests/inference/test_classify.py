"""`clip-la classify`: probabilities for people, JSON, and a page with thumbnails."""

from __future__ import annotations

import errno
import html.parser
import json
import os
from pathlib import Path

import pytest
import torch
from PIL import Image

from clip_la.bundle import ClipBundle
from clip_la.checkpoint import load_bundle
from clip_la.cli import main
from clip_la.evaluate.features import encode_class_names
from clip_la.evaluate.templates import load_templates
from clip_la.exit_codes import EXIT_FAILED, EXIT_USAGE
from clip_la.inference.classify import ClassifyOptions, classify, read_labels
from clip_la.model_choice import probabilities
from tiny_run import COLOURS, picture


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "my <pictures>"
    folder.mkdir()
    for name, colour in COLOURS.items():
        (folder / f"{name} ünï.png").write_bytes(picture(colour))
    return folder


def run(run_folder: Path, *flags: str | Path) -> int:
    return main(["classify", *map(str, flags), "--checkpoint", str(run_folder), "--device", "cpu"])


def test_probabilities_are_those_of_the_model(run_folder: Path, pictures: Path, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    labels = ["red", "größe, 大", "blue"]
    (tmp_path / "labels.txt").write_text("\n".join(labels) + "\n\n", encoding="utf-8")
    flags = ["--labels-file", tmp_path / "labels.txt", "--templates", "simple-7", "--json", found]
    assert run(run_folder, pictures, *flags) == 0
    content = json.loads(found.read_text(encoding="utf-8"))
    assert content["labels"] == labels
    assert content["exclusive"] is True
    bundle = load_bundle(run_folder)
    features = encode_class_names(bundle, labels, load_templates("simple-7"))
    scale = bundle.model.get_parameter("logit_scale").exp().item()
    assert len(content["images"]) == len(COLOURS)
    for item in content["images"]:
        with Image.open(item["path"]) as image:
            feature = bundle.encode_image(bundle.preprocess_val(image.convert("RGB"))[None])
        expected = (scale * feature @ features.T).softmax(dim=-1)[0].tolist()
        assert list(item["probabilities"].values()) == pytest.approx(expected, abs=1e-5)
        assert sum(item["probabilities"].values()) == pytest.approx(1, abs=1e-5)


def test_the_table(run_folder: Path, pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(run_folder, pictures, "--labels", "red, blue,green", "--templates", "plain", "--top", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    block = lines.index(f"{pictures}/red ünï.png")
    shares = [float(line.split("%")[0].split()[-1]) for line in lines[block + 1 : block + 3]]
    assert shares == sorted(shares, reverse=True)
    assert lines[block + 3].startswith(str(pictures))
    assert lines[-1].startswith("4 pictures: ")


class Page(html.parser.HTMLParser):
    """Tags with their attributes, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page(run_folder: Path, pictures: Path, tmp_path: Path) -> None:
    (pictures / "broken.jpg").write_bytes(b"no picture")
    out = tmp_path / "new folder" / "page.html"
    labels = "red,<script>alert(1)</script>,\"quoted'"
    assert run(run_folder, pictures, "--labels", labels, "--html", out, "--html-max", "3") == 0
    page = Page(out.read_text(encoding="utf-8"))
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 3
    assert all(str(image["src"]).startswith("data:image/jpeg;base64,") for image in images)
    assert all(str(pictures) in str(image["alt"]) and " %" in str(image["alt"]) for image in images)
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}
    assert "<script>alert(1)</script>" in page.text
    assert "1 more pictures are not shown here" in page.text
    assert "broken.jpg: image_format" in page.text
    assert ("html", {"lang": "en"}) in page.tags
    assert any(attributes.get("name") == "viewport" for _, attributes in page.tags)


def test_pictures_are_upright(run_folder: Path, tmp_path: Path) -> None:
    image = Image.new("RGB", (32, 32), COLOURS["red"])
    image.paste(COLOURS["blue"], (0, 0, 32, 16))
    image.save(tmp_path / "upright.png")
    exif = Image.Exif()
    exif[0x0112] = 3  # shown upside down
    image.rotate(180).save(tmp_path / "turned.png", exif=exif)
    found = tmp_path / "found.json"
    image.rotate(180).save(tmp_path / "other.png")
    paths = [tmp_path / f"{name}.png" for name in ("upright", "turned", "other")]
    assert run(run_folder, *paths, "--labels", "red,blue", "--templates", "plain", "--json", found) == 0
    upright, turned, other = (
        item["probabilities"]["red"] for item in json.loads(found.read_text())["images"]
    )
    assert turned == pytest.approx(upright, abs=1e-6)
    assert other != pytest.approx(upright, abs=1e-4)


def test_a_broken_file_fails_only_where_it_was_named(
    run_folder: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = pictures / "broken.jpg"
    broken.write_bytes(b"")
    assert run(run_folder, pictures, "--labels", "red,blue") == 0
    assert "not readable: image_empty" in capsys.readouterr().out
    assert run(run_folder, pictures, broken, "--labels", "red,blue") == EXIT_FAILED
    assert "1 of 5 can't be read" in capsys.readouterr().err
    assert run(run_folder, broken, "--labels", "red,blue") == EXIT_FAILED
    assert "1 of 1 can't be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["a.png"], EXIT_USAGE, "give the labels either as"),
        (["a.png", "--labels", "a,b", "--labels-file", "x"], EXIT_USAGE, "give the labels either as"),
        (["a.png", "--labels", "a,b,a,c,c"], EXIT_FAILED, "given more than once: a, c"),
        (["a.png", "--labels", "a"], EXIT_FAILED, "always 100 %"),
        (["a.png", "--labels", "a,,b"], EXIT_FAILED, "has an empty label"),
        (["a.png", "--labels-file", "missing.txt"], EXIT_FAILED, "no file at missing.txt"),
        (["a.png", "--labels-file", "latin.txt"], EXIT_FAILED, "not UTF-8"),
        (["missing.png", "--labels", "a,b"], EXIT_FAILED, "no image and no folder at missing.png"),
        (["empty", "--labels", "a,b"], EXIT_FAILED, "no image in the folder empty"),
        (["a.png", "--labels", "a,b", "--templates", "nope"], EXIT_FAILED, "templates: nope"),
        (["a.png", "--labels", "a,b", "--top", "0"], EXIT_USAGE, "must be at least 1"),
    ],
)
def test_what_can_t_be_classified(
    flags: list[str],
    code: int,
    message: str,
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.png").write_bytes(picture((1, 2, 3)))
    (tmp_path / "latin.txt").write_bytes("größe\nb".encode("latin-1"))
    assert run(run_folder, *flags) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_a_full_disk_leaves_what_was_there(
    flag: str,
    run_folder: Path,
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = tmp_path / "results" / "found"
    target.parent.mkdir()
    target.write_text("from before")
    monkeypatch.setattr("clip_la.inference.files.os.fsync", refuse)
    assert run(run_folder, pictures, "--labels", "red,blue", flag, target) == EXIT_FAILED
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in target.parent.iterdir()] == ["found"]
    assert target.read_text() == "from before"


def test_the_same_picture_twice_counts_once(run_folder: Path, pictures: Path, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    assert run(run_folder, pictures, pictures / "red ünï.png", "--labels", "red,blue", "--json", found) == 0
    assert len(json.loads(found.read_text())["images"]) == len(COLOURS)


def test_a_siglip_model_judges_each_label_by_itself(run_folder: Path, pictures: Path) -> None:
    bundle: ClipBundle = load_bundle(run_folder)
    bundle.model.logit_bias = torch.nn.Parameter(torch.tensor(-3.0))
    options = ClassifyOptions([str(pictures)], labels="red,blue", templates="plain")
    result = classify(bundle, options, read_labels(options), [pictures / "red ünï.png"])
    assert result.exclusive is False
    image, labels = torch.eye(2)[:1], torch.eye(2)
    scale = bundle.model.get_parameter("logit_scale").exp()
    expected = torch.sigmoid(torch.stack([scale - 3, torch.tensor(-3.0)]))
    torch.testing.assert_close(probabilities(bundle, image, labels)[0], expected)
