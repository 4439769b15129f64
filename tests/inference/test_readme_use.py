"""The commands of the README's "Use a trained model", as they stand there."""

from __future__ import annotations

import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from clip_la.cli import main
from tiny_run import COLOURS, colour_shard, picture, write_tar

README = Path(__file__).resolve().parents[2] / "README.md"
NEEDS = {"--onnx": "onnxruntime", "--benchmark": "clip_benchmark", "embed": "pyarrow"}


def commands() -> list[list[str]]:
    section = README.read_text(encoding="utf-8").split("## Use a trained model")[1].split("\n## ")[0]
    lines = re.findall(r"^clip-la .*$", section, re.MULTILINE)
    return [shlex.split(line)[1:] for line in lines]


def prepare(folder: Path, run_folder: Path) -> None:
    """The files that the commands name."""
    shutil.copytree(run_folder, folder / "logs" / "vit-b-16-la")
    (folder / "photos").mkdir()
    (folder / "photos" / "holiday.jpg").write_bytes(picture(COLOURS["red"]))
    (folder / "shards").mkdir()
    for shard in range(2):
        colour_shard(folder / "shards" / f"0000{shard}.tar", 4)
    test = folder / "sets" / "flowers" / "test"
    test.mkdir(parents=True)
    members = {
        f"{n}.{kind}": data
        for n in range(2)
        for kind, data in {"png": picture((n, 9, 9)), "cls": b"0"}.items()
    }
    write_tar(test / "0.tar", members)
    (test / "nshards.txt").write_text("1")
    (test.parent / "classnames.txt").write_text("rose\ndaisy\n")
    (test.parent / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\n")


def test_every_command_works(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, run_folder)
    monkeypatch.chdir(tmp_path)
    found = commands()
    assert {command[0] for command in found} == {"classify", "embed", "export", "eval"}
    left_out = set()
    for command in found:
        missing = {flag for flag, package in NEEDS.items() if flag in command and find_spec(package) is None}
        left_out |= missing
        if missing <= {"--onnx"}:
            assert main([word for word in command if word not in missing]) == 0
    assert (tmp_path / "photos.html").is_file()
    assert (tmp_path / "hub" / "vit-b-16-la" / "open_clip_model.safetensors").is_file()
    if left_out:
        pytest.skip(
            f"done, but for {', '.join(sorted(left_out))}: {[NEEDS[flag] for flag in left_out]} not installed"
        )
