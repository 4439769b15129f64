"""Embeddings: complete, aligned, counted, and the same whether or not they were interrupted."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from clip_la.checkpoint import load_bundle
from clip_la.cli import main
from clip_la.exit_codes import EXIT_FAILED, EXIT_USAGE
from clip_la.inference import parts as parts_module
from tiny_run import COLOURS, colour_shard, picture, write_tar

pyarrow_parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed (extra `embed`)")


def embed(run_folder: Path, out: Path, *flags: str | Path) -> int:
    return main(["embed", str(run_folder), "--out", str(out), "--device", "cpu", *map(str, flags)])


def arrays(out: Path, name: str) -> np.ndarray[Any, Any]:
    files = sorted((out / name).glob("*.npy"), key=lambda path: int(path.stem.rpartition("_")[2]))
    return np.concatenate([np.load(path) for path in files])


def metadata(out: Path) -> dict[str, list[Any]]:
    files = sorted((out / "metadata").glob("*.parquet"), key=lambda path: int(path.stem.rpartition("_")[2]))
    tables = [pyarrow_parquet.read_table(path).to_pydict() for path in files]
    return {name: [value for table in tables for value in table[name]] for name in tables[0]}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Ten pictures at two depths, with odd names, beside things that are none."""
    folder = tmp_path / "my pictures"
    (folder / "sub folder").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for index in range(10):
        name = f"sub folder/ünï {index}.png" if index % 2 else f"{index} a.JPG"
        pixels = rng.integers(0, 256, (40, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name, "PNG")
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.png").write_bytes(picture((1, 2, 3)))
    return folder


def test_a_folder(run_folder: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert embed(run_folder, out, "--images", images, "--dtype", "float32", "--rows-per-file", 4) == 0
    assert "10 embedded in 3 part(s)" in capsys.readouterr().out
    found, rows = arrays(out, "img_emb"), metadata(out)
    assert found.dtype == np.float32
    parts = [np.load(out / "img_emb" / f"img_emb_{part}.npy") for part in range(3)]
    assert [part.shape for part in parts] == [(4, 32), (4, 32), (2, 32)]
    assert len(set(rows["image_path"])) == 10
    bundle = load_bundle(run_folder)
    for path, feature in zip(rows["image_path"], found, strict=True):
        with Image.open(path) as image:
            expected = bundle.encode_image(bundle.preprocess_val(image.convert("RGB"))[None])[0]
        np.testing.assert_allclose(feature, expected.numpy(), atol=1e-6)
    assert not (out / "text_emb").exists()
    assert not (out / "unusable").exists()


def test_shards_with_captions_and_broken_members(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    colour_shard(tmp_path / "0.tar", 12)
    members = {"x.jpg": picture(COLOURS["red"]), "y.jpg": b"broken", "y.txt": b"y", "z.txt": b"alone"}
    members |= {
        "u.jpg": picture(COLOURS["blue"]),
        "u.txt": b"\xff\xfe",
        "v.jpg": picture((9, 9, 9)),
        "v.txt": b" \n",
    }
    write_tar(tmp_path / "1.tar", members)
    shards = str(tmp_path / "{0..2}.tar")
    out = tmp_path / "both"
    assert embed(run_folder, out, "--images", shards, "--texts", "captions") == 0
    rows = metadata(out)
    assert arrays(out, "img_emb").shape == arrays(out, "text_emb").shape == (12, 32)
    assert arrays(out, "img_emb").dtype == np.float16
    assert rows["caption"] == [list(COLOURS)[index % 4] for index in range(12)]
    assert rows["url"][3] == "https://example.org/3.jpg"
    assert json.loads(rows["json"][3])["width"] == 32
    unusable = [json.loads(line) for line in (out / "unusable" / "unusable_0.jsonl").read_text().splitlines()]
    assert {(loss["key"], loss["cause"]) for loss in unusable} == {
        ("x", "text_empty"),
        ("y", "image_format"),
        ("z", "no_image"),
        ("u", "text_encoding"),
        ("v", "text_empty"),
        (None, "shard_missing"),
    }
    counts = "6 not usable: 1 image_format, 1 no_image, 1 shard_missing, 2 text_empty, 1 text_encoding"
    assert counts in capsys.readouterr().out
    alone = tmp_path / "alone"
    assert embed(run_folder, alone, "--images", shards) == 0  # x, u and v need no caption now
    rows = metadata(alone)
    assert rows["image_path"][12:] == ["x", "u", "v"]
    assert rows["caption"][12:] == [None, None, None]
    assert np.array_equal(arrays(alone, "img_emb")[:12], arrays(out, "img_emb"))


def test_text_lines(run_folder: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_bytes("red\n\nein größeres Bild\r\n".encode() + b"\xff\n" + b"last")
    out = tmp_path / "out"
    assert embed(run_folder, out, "--texts", texts, "--dtype", "float32", "--batch-size", 2) == 0
    rows = metadata(out)
    assert rows == {"line": ["1", "3", "5"], "caption": ["red", "ein größeres Bild", "last"]}
    bundle = load_bundle(run_folder)
    expected = bundle.encode_text(bundle.tokenizer(rows["caption"])).numpy()
    np.testing.assert_allclose(arrays(out, "text_emb"), expected, atol=1e-6)
    assert not (out / "img_emb").exists()


def test_an_interrupted_run_goes_on_to_the_same_bytes(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for shard in range(3):
        colour_shard(tmp_path / f"{shard}.tar", 7)
    flags = [
        "--images",
        tmp_path / "{0..2}.tar",
        "--texts",
        "captions",
        "--rows-per-file",
        5,
        "--batch-size",
        2,
    ]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert embed(run_folder, whole, *flags) == 0
    original, num_saved = np.save, 0

    def save_until_full(file: Any, arr: Any) -> None:
        nonlocal num_saved
        num_saved += 1
        if num_saved == 6:  # the second array of the third part
            file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(file, arr)

    monkeypatch.setattr(parts_module.np, "save", save_until_full)
    assert embed(run_folder, broken, *flags) == EXIT_FAILED
    assert "No space left on device" in capsys.readouterr().err
    monkeypatch.undo()
    assert not list(broken.rglob("*.tmp"))
    kept = {path: path.stat().st_ino for path in (broken / "img_emb").glob("img_emb_[01].npy")}
    assert len(kept) == 2
    assert embed(run_folder, broken, *flags) == 0
    assert "21 embedded in 5 part(s), 2 of them from an earlier start" in capsys.readouterr().out
    assert all(path.stat().st_ino == inode for path, inode in kept.items())
    names = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(broken) for path in broken.rglob("*") if path.is_file())
    assert all((whole / name).read_bytes() == (broken / name).read_bytes() for name in names)
    assert embed(run_folder, broken, *flags) == 0
    assert "5 of them from an earlier start" in capsys.readouterr().out


def test_another_source_into_the_same_folder_is_refused(
    run_folder: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert embed(run_folder, out, "--images", images) == 0
    assert embed(run_folder, out, "--images", images, "--dtype", "float32") == EXIT_FAILED
    assert "dtype was float16, is float32" in capsys.readouterr().err
    Image.new("RGB", (8, 8)).save(images / "one more.png")
    assert embed(run_folder, out, "--images", images) == EXIT_FAILED
    assert "source_hash was" in capsys.readouterr().err
    assert embed(run_folder, images, "--images", images) == EXIT_FAILED
    assert "is not empty and holds no embeddings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ([], EXIT_USAGE, "nothing to embed"),
        (["--texts", "captions"], EXIT_USAGE, "nothing to embed"),
        (["--images", "empty", "--texts", "a.txt"], EXIT_USAGE, "belong to no image"),
        (["--images", "empty"], EXIT_FAILED, "no image in empty"),
        (["--images", "nowhere"], EXIT_FAILED, "found nothing at nowhere"),
        (["--images", "no_*.tar"], EXIT_FAILED, "no shard matches"),
        (["--images", "broken"], EXIT_FAILED, "nothing in broken could be embedded: 1 image_empty"),
        (["--texts", "nowhere.txt"], EXIT_FAILED, "one text a line"),
        (["--images", "broken", "--rows-per-file", "0"], EXIT_USAGE, "must be at least 1"),
    ],
)
def test_what_can_t_be_embedded(
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
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"")
    assert embed(run_folder, tmp_path / "out", *flags) == code
    assert message in capsys.readouterr().err


def test_without_pyarrow_it_says_how_to_get_it(
    run_folder: Path,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("clip_la.inference.embed.find_spec", lambda name: None)
    assert embed(run_folder, tmp_path / "out", "--images", images) == EXIT_FAILED
    assert "pip install 'clip_la[embed]'" in capsys.readouterr().err


def test_a_name_that_is_no_text(run_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    with open(os.fsencode(folder) + b"/\xff.png", "wb") as file:
        file.write(picture((1, 2, 3)))
    assert embed(run_folder, tmp_path / "out", "--images", folder) == 0
    assert metadata(tmp_path / "out")["image_path"] == [f"{folder}/\\xff.png"]


def test_a_model_that_is_broken_writes_nothing(run_folder: Path, images: Path, tmp_path: Path) -> None:
    bundle = load_bundle(run_folder)
    with torch.no_grad():
        bundle.model.get_parameter("visual.proj").fill_(torch.nan)
    from clip_la.inference.embed import EmbedOptions
    from clip_la.inference.embed import embed as embed_images

    with pytest.raises(ValueError, match="image features are not finite"):
        embed_images(bundle, EmbedOptions(tmp_path / "out", str(images)))
    assert not (tmp_path / "out" / "img_emb").exists()
