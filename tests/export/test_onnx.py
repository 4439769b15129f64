"""Both towers through torch.export and ONNX, at batch sizes that the trace has not seen."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from clip_la.bundle import ClipBundle, build, resolve_model_config
from clip_la.checkpoint import load_bundle
from clip_la.cli import main
from clip_la.exit_codes import EXIT_FAILED
from clip_la.export import onnx
from tiny_run import write_model_config

needs_onnx = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")),
    reason="onnx, onnxruntime or onnxscript is not installed (extra `onnx`)",
)


def tiny_bundle(tmp_path: Path, attention: dict[str, object] | None, precision: str = "fp32") -> ClipBundle:
    config = resolve_model_config(str(write_model_config(tmp_path / "tiny.json", attention)))
    return build(config, model_name="tiny", precision=precision)


@pytest.mark.parametrize(
    "attention", [{"kind": "eq7"}, {"kind": "eq7", "gain": 8, "centre_values": True}, {"kind": "eq4"}, None]
)
@pytest.mark.parametrize("name", ["image", "text"])
def test_a_traced_tower_takes_any_batch(
    name: str, attention: dict[str, object] | None, tmp_path: Path
) -> None:
    bundle = tiny_bundle(tmp_path, attention)
    program = onnx.trace_tower(bundle, name).module()
    tower = onnx.Tower(bundle.model, f"encode_{name}")
    for batch in (1, 3):
        example = onnx._example(bundle, name, batch, seed=batch)
        torch.testing.assert_close(program(example), tower(example), rtol=1e-5, atol=1e-6)


@needs_onnx
def test_onnx_files_beside_the_hub_folder(run_folder: Path, tmp_path: Path) -> None:
    import onnxruntime

    assert main(["export", str(run_folder), "--out", str(tmp_path / "out"), "--onnx"]) == 0
    folder = tmp_path / "out" / "onnx"
    bundle = load_bundle(run_folder)
    check = json.loads((folder / "check.json").read_text())
    assert check["logit_scale"] == pytest.approx(bundle.model.get_parameter("logit_scale").exp().item())
    inputs = {
        "vision_model.onnx": torch.randn(7, 3, 32, 32),
        "text_model.onnx": bundle.tokenizer(["red", "", "a " * 50, "blue and green", "größe", "1", "x"]),
    }
    for tower, encode in zip(check["towers"], (bundle.encode_image, bundle.encode_text), strict=True):
        session = onnxruntime.InferenceSession(str(folder / tower["file"]))
        (given,) = session.get_inputs()
        assert (given.name, given.shape[0]) == (tower["input"], "batch")
        batch = inputs[tower["file"]]
        (found,) = session.run([tower["output"]], {tower["input"]: batch.numpy()})
        np.testing.assert_allclose(found, encode(batch).numpy(), atol=onnx.TOLERANCE)
        assert tower["max_abs_difference"] <= onnx.TOLERANCE
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| `onnx/text_model.onnx` | `tokens` int64 ['batch', 16] | `text_features` (batch, 32) |" in card


@needs_onnx
def test_a_bfloat16_model_is_exported_in_float32(tmp_path: Path) -> None:
    bundle = tiny_bundle(tmp_path, {"kind": "eq4"}, precision="pure_bf16")
    onnx._write_tower(bundle, "image", "images", tmp_path / "image.onnx")
    assert onnx._check(bundle, "image", tmp_path / "image.onnx").max_abs_difference < onnx.TOLERANCE
    assert bundle.model.get_parameter("visual.proj").dtype == torch.bfloat16


@needs_onnx
def test_files_that_compute_something_else_are_not_kept(
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_tower = onnx._write_tower

    def write_another(bundle: ClipBundle, *args: object) -> None:
        projection = bundle.model.get_parameter("visual.proj")
        original = projection.detach().clone()
        projection.data[:, 0] *= 1.01
        write_tower(bundle, *args)
        projection.data.copy_(original)

    monkeypatch.setattr(onnx, "_write_tower", write_another)
    assert main(["export", str(run_folder), "--out", str(tmp_path / "out"), "--onnx"]) == EXIT_FAILED
    assert "computes something else in onnxruntime" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_the_packages_it_says_how_to_get_them(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onnx, "find_spec", lambda name: None if name == "onnxruntime" else sys)
    assert main(["export", str(run_folder), "--out", str(tmp_path / "out"), "--onnx"]) == EXIT_FAILED
    assert "ONNX export needs onnxruntime: pip install 'clip_la[onnx]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
