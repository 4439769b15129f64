"""Pushing an export to the hub and loading it back from there, through the real client and a local server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import open_clip
import pytest
import torch
from hub_server import TOKEN, Hub, running_hub

from clip_la.checkpoint import load_bundle
from clip_la.cli import main
from clip_la.exit_codes import EXIT_FAILED

STOCK_LOAD = "import open_clip; open_clip.create_model_and_transforms('hf-hub:me/tiny')"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The only hub that this process knows, with a login."""
    with running_hub() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def push(run_folder: Path, out: Path, *flags: str) -> int:
    return main(["export", str(run_folder), "--out", str(out), "--push-to-hub", *flags])


def test_push_and_load_back(
    hub: Hub, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert push(run_folder, out, "me/tiny") == 0
    assert "pushed: " in capsys.readouterr().out
    assert hub.private == {"me/tiny": True}
    assert hub.files["me/tiny"] == {path.name: path.read_bytes() for path in out.iterdir()}
    assert 'name = "hf-hub:me/tiny"' in (out / "README.md").read_text()
    model, _, _ = open_clip.create_model_and_transforms("hf-hub:me/tiny", cache_dir=str(tmp_path / "cache"))
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(model.eval().encode_image(images), load_bundle(run_folder).model.encode_image(images))


def test_loaded_without_the_plugin_it_says_so(hub: Hub, run_folder: Path, tmp_path: Path) -> None:
    assert push(run_folder, tmp_path / "out", "me/tiny", "--public") == 0
    assert hub.private == {"me/tiny": False}
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url}
    command = [sys.executable, "-c", STOCK_LOAD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "unexpected keyword argument 'requires_import_clip_la'" in done.stderr


@pytest.mark.parametrize(
    ("repo", "token", "message"),
    [
        ("me/tiny", "", "not logged in to the Hugging Face Hub"),
        ("me/tiny", "hf_wrong", "refused the login"),
        ("tiny", TOKEN, "expected OWNER/NAME"),
    ],
)
def test_what_can_t_be_pushed_is_known_before_the_work(
    repo: str,
    token: str,
    message: str,
    hub: Hub,
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    assert push(run_folder, tmp_path / "out", repo) == EXIT_FAILED
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not hub.files


def test_a_push_that_fails_keeps_the_folder(
    hub: Hub, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.refuses_commits = True
    assert push(run_folder, tmp_path / "out", "me/tiny") == EXIT_FAILED
    assert "the folder is kept" in capsys.readouterr().err
    assert (tmp_path / "out" / "open_clip_model.safetensors").is_file()
