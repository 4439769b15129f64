"""A shard folder and a config for checks that train nothing."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture
def shard_folder(tmp_path: Path) -> Path:
    """Three shards of four pairs, with sizes.json, in `shards/`."""
    folder = tmp_path / "shards"
    folder.mkdir()
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 40, 40)).save(buffer, "JPEG")
    for shard in range(3):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for index in range(4):
                for suffix, data in (("jpg", buffer.getvalue()), ("txt", b"red")):
                    info = tarfile.TarInfo(f"{shard}{index:03d}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    (folder / "sizes.json").write_text(json.dumps({f"{shard:05d}.tar": 4 for shard in range(3)}))
    return folder


@pytest.fixture
def config_file(tmp_path: Path, shard_folder: Path) -> Path:
    """A run config over these shards."""
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: ViT-nano-8-LA\ntrain-data: {shard_folder}/{{00000..00002}}.tar\nbatch-size: 2\nworkers: 1\n"
        f"logs: {tmp_path / 'logs'}\nwarmup: 2\n"
    )
    return path
