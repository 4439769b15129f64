"""A small world with the names that the documentation uses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from docs_blocks import REPO_ROOT
from docs_commands import SMALLER

from clip_la.cli import main
from tiny_run import COLOURS, colour_shard, picture, train_tiny_run, write_tar

LINKED = ("configs", "scripts", "slurm", "benchmarks")


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, a demo set, pictures, shards and a CLIP_benchmark set, under the names of the pages."""
    folder = tmp_path_factory.mktemp("world")
    assert main(["demo-data", str(folder / "data"), *SMALLER["demo-data"].split()]) == 0
    shutil.copytree(train_tiny_run(tmp_path_factory.mktemp("tiny")), folder / "logs" / "vit-b-16-la")
    (folder / "photos").mkdir()
    for name, colour in COLOURS.items():
        (folder / "photos" / f"{name}.jpg").write_bytes(picture(colour))
    (folder / "shards").mkdir()
    for shard in range(2):
        colour_shard(folder / "shards" / f"{shard:05d}.tar", 4)
    _write_benchmark_set(folder / "sets" / "flowers")
    return folder


def _write_benchmark_set(folder: Path) -> None:
    (folder / "test").mkdir(parents=True)
    members = {
        f"{n}.{kind}": data
        for n in range(2)
        for kind, data in {"png": picture((n, 9, 9)), "cls": b"0"}.items()
    }
    write_tar(folder / "test" / "0.tar", members)
    (folder / "test" / "nshards.txt").write_text("1")
    (folder / "classnames.txt").write_text("rose\ndaisy\n")
    (folder / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\n")


@pytest.fixture
def place(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the world to work in, with the repository's folders beside it; the working folder."""
    folder = tmp_path / "place"
    shutil.copytree(world, folder)
    for name in LINKED:
        (folder / name).symlink_to(REPO_ROOT / name)
    monkeypatch.chdir(folder)
    return folder
