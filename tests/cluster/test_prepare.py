"""scripts/prepare_laion400m.sh with a stand-in for img2dataset: flags, sizes.json, going on, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prepare_laion400m.sh"


@pytest.fixture
def stand_in(tmp_path: Path, shard_folder: Path) -> dict[str, str]:
    """An environment whose img2dataset notes its arguments and copies shards; DOWNLOADED names how many."""
    commands, modules = tmp_path / "bin", tmp_path / "modules" / "pyarrow"
    commands.mkdir()
    modules.mkdir(parents=True)
    (modules / "__init__.py").touch()
    (modules / "parquet.py").write_text(
        "from types import SimpleNamespace\n"
        "def read_schema(path):\n    return SimpleNamespace(names=path.read_text().split())\n"
    )
    (commands / "img2dataset").write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/called\nmkdir -p {tmp_path}/out\n'
        f"cp {shard_folder}/*.tar {tmp_path}/out\n"
        f"for n in $DOWNLOADED; do echo '{{\"successes\": 4}}' >{tmp_path}/out/${{n}}_stats.json; done\n"
    )
    (commands / "clip-la").write_text(f'#!/bin/sh\nexec {sys.executable} -m clip_la.cli "$@"\n')
    for command in commands.iterdir():
        command.chmod(0o755)
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "part.parquet").write_text("SAMPLE_ID URL TEXT")
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": f"{modules.parent}:{os.environ.get('PYTHONPATH', '')}"}


def prepare(folder: Path, environment: dict[str, str], downloaded: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, folder / "meta", folder / "out"],
        env={**environment, "DOWNLOADED": downloaded, "SAMPLE": "2"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_downloads_counts_and_checks_and_goes_on(tmp_path: Path, stand_in: dict[str, str]) -> None:
    cut_off = prepare(tmp_path, stand_in, "00000 00001")
    assert cut_off.returncode == 1
    assert "1 unfinished shard(s), first 00002.tar: run this script again" in cut_off.stderr
    assert not (tmp_path / "out" / "sizes.json").exists()

    done = prepare(tmp_path, stand_in, "00000 00001 00002")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "sizes.json").read_text()) == {f"0000{n}.tar": 4 for n in range(3)}
    assert json.loads((tmp_path / "out" / "check.json").read_text())["usable"] == 8
    assert "/out/{00000..00002}.tar'" in done.stdout
    called = (tmp_path / "called").read_text()
    for flags in (
        "--url_col URL --caption_col TEXT",
        "--resize_mode keep_ratio",
        "--incremental_mode incremental",
    ):
        assert flags in called


def test_refuses_what_it_cannot_read(tmp_path: Path, stand_in: dict[str, str]) -> None:
    (tmp_path / "meta" / "part.parquet").write_text("id caption")
    assert "no columns of links and captions among id, caption" in prepare(tmp_path, stand_in, "").stderr
    (tmp_path / "meta" / "part.parquet").unlink()
    assert "no .parquet file in" in prepare(tmp_path, stand_in, "").stderr
    assert not (tmp_path / "called").exists()
