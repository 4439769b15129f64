"""LAION's CLIP_benchmark, the real one, on a model of this package and a small webdataset folder."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from clip_la.bundle import build, resolve_model_config
from clip_la.cli import main
from clip_la.evaluate import benchmark
from clip_la.exit_codes import EXIT_FAILED, EXIT_USAGE
from clip_la.export.hub import write_hub_folder
from tiny_run import COLOURS, RECOMMENDED, write_model_config, write_tar

NUM_IMAGES = 24
LABELS = [index % len(COLOURS) for index in range(NUM_IMAGES)]


def noise(seed: int) -> bytes:
    """A PNG of coarse noise, another for each seed."""
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((32, 32)).save(buffer, "PNG")
    return buffer.getvalue()


def write_set(folder: Path, suffix: str, texts: list[str]) -> None:
    """A data set in CLIP_benchmark's layout, in two shards."""
    (folder / "test").mkdir(parents=True)
    for shard in (0, 1):
        members: dict[str, bytes] = {}
        for index in range(shard, NUM_IMAGES, 2):
            members[f"s{index:05d}.png"] = noise(index)
            members[f"s{index:05d}.{suffix}"] = texts[index].encode()
        write_tar(folder / "test" / f"{shard}.tar", members)
    (folder / "test" / "nshards.txt").write_text("2\n")


@pytest.fixture
def hub_folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = resolve_model_config(str(write_model_config(tmp_path / "tiny.json", RECOMMENDED)))
    write_hub_folder(build(config, model_name="tiny"), tmp_path / "hub", lambda _: "card")
    return tmp_path / "hub"


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    pytest.importorskip("clip_benchmark", reason="CLIP_benchmark is not installed (extra `benchmark`)")
    root = tmp_path / "sets"
    write_set(root / "colours", "cls", [str(label) for label in LABELS])
    (root / "colours" / "classnames.txt").write_text("\n".join(COLOURS) + "\n")
    (root / "colours" / "zeroshot_classification_templates.txt").write_text("{c}\n")
    names = list(COLOURS)
    write_set(root / "pairs", "txt", [f"{names[label]}\nvery {names[label]}" for label in LABELS])
    (root / "pairs" / "dataset_type.txt").write_text("retrieval\n")
    return root


def test_zero_shot_agrees_with_clip_la_eval(
    hub_folder: Path, sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["eval", "--checkpoint", str(hub_folder), "--workers", "0", "--device", "cpu"]
    out = tmp_path / "out {odd}"
    flags = [
        "--benchmark",
        "wds/colours",
        "--benchmark-root",
        str(sets / "{dataset}"),
        "--benchmark-out",
        str(out),
    ]
    assert main([*model, *flags]) == 0
    assert "zeroshot_classification: acc1" in capsys.readouterr().out
    assert [path.name for path in out.iterdir()] == ["colours_zeroshot_classification_en.json"]
    found = json.loads((out / "colours_zeroshot_classification_en.json").read_text())
    assert found["pretrained"] == str(hub_folder)
    own = tmp_path / "own.json"
    tree = ["--zeroshot", str(sets / "colours"), "--templates", "plain", "--no-cache", "--json", str(own)]
    assert main([*model, *tree]) == 0
    assert found["metrics"]["acc1"] == json.loads(own.read_text())["metrics"]["top1"]
    assert 0 < found["metrics"]["acc1"] < 1


def test_retrieval_with_more_workers_than_shards(hub_folder: Path, sets: Path, tmp_path: Path) -> None:
    flags = ["--benchmark", "wds/pairs", "--benchmark-root", str(sets / "{dataset}"), "--workers", "5"]
    flags += [
        "--benchmark-args",
        "--task zeroshot_retrieval --recall_k 1 24",
        "--benchmark-out",
        str(tmp_path / "out"),
    ]
    assert main(["eval", "--checkpoint", str(hub_folder), "--device", "cpu", *flags]) == 0
    found = json.loads((tmp_path / "out" / "pairs_zeroshot_retrieval_en.json").read_text())["metrics"]
    assert found["image_retrieval_recall@24"] == 1.0
    assert 0 <= found["image_retrieval_recall@1"] < 1


def test_what_fails_inside_is_one_line(
    hub_folder: Path, sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--benchmark", "wds/nothing", "--benchmark-root", str(sets / "{dataset}"), "--device", "cpu"]
    out = tmp_path / "out"
    code = main(["eval", "--checkpoint", str(hub_folder), *flags, "--benchmark-out", str(out)])
    assert code == EXIT_FAILED
    assert "CLIP_benchmark failed: FileNotFoundError" in capsys.readouterr().err
    assert not list(out.iterdir())


def test_a_replaced_accuracy_is_told(sets: Path, caplog: pytest.LogCaptureFixture) -> None:
    from clip_benchmark.metrics import zeroshot_classification

    original = zeroshot_classification.accuracy
    scores, labels = torch.randn(50, 10), torch.arange(50) % 10
    with benchmark._working_accuracy():
        top1, top5 = zeroshot_classification.accuracy(scores, labels, topk=(1, 5))
        was_replaced = zeroshot_classification.accuracy is not original
    assert zeroshot_classification.accuracy is original
    assert was_replaced == ("is replaced for this run" in caplog.text)
    best = scores.topk(5, dim=1).indices
    assert top1 == pytest.approx((best[:, 0] == labels).double().mean().item())
    assert top5 == pytest.approx((best == labels[:, None]).any(dim=1).double().mean().item())


def test_flags_that_clip_la_sets_are_refused(hub_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--benchmark", "wds/x", "--benchmark-args=--model_type=open_clip"]
    assert main(["eval", "--checkpoint", str(hub_folder), *flags]) == EXIT_USAGE
    assert "can't have --model_type" in capsys.readouterr().err


def test_without_the_package_it_says_how_to_get_it(
    hub_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "find_spec", lambda name: None)
    flags = ["--benchmark", "wds/x", "--device", "cpu"]
    assert main(["eval", "--checkpoint", str(hub_folder), *flags]) == EXIT_FAILED
    assert "pip install 'clip_la[benchmark]'" in capsys.readouterr().err
