"""Hub folders and safetensors: loaded by OpenCLIP with and without the plugin, whole or not at all."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import open_clip
import pytest
import torch
from safetensors import SafetensorError

from clip_la.checkpoint import load_bundle
from clip_la.cli import main
from clip_la.exit_codes import EXIT_FAILED, EXIT_USAGE
from clip_la.export import hub
from clip_la.model_choice import ModelChoice, load_model
from tiny_run import RECOMMENDED, SAMPLES, write_model_config

FILES = {"open_clip_config.json", "open_clip_model.safetensors", "README.md"}


@pytest.fixture(scope="module")
def exported(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "my model ünï"
    assert main(["export", str(run_folder), "--out", str(out)]) == 0
    return out


STOCK_LOAD = """
import sys, open_clip
soft, linear = ("local-dir:" + folder for folder in sys.argv[1:])
model = open_clip.create_model_and_transforms(soft)[0].eval()
print(model.encode_text(open_clip.get_tokenizer(soft)(["red"])).double().sum().item())
assert "clip_la" not in sys.modules
open_clip.create_model_and_transforms(linear)
"""


def test_features_are_equal_to_the_bit(exported: Path, run_folder: Path) -> None:
    name = f"local-dir:{exported}"
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    tokens = open_clip.get_tokenizer(name)(["a red thing", "blue"])
    bundle = load_bundle(run_folder)
    images = torch.rand(3, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(model.eval().encode_image(images), bundle.model.encode_image(images))
        assert torch.equal(model.encode_text(tokens), bundle.model.encode_text(tokens))
    assert torch.equal(tokens, bundle.tokenizer(["a red thing", "blue"]))
    assert str(preprocess) == str(bundle.preprocess_val)
    again = load_model(ModelChoice(exported), "cpu")
    assert torch.equal(again.encode_image(images), bundle.encode_image(images))
    assert again.spec == bundle.spec


def test_the_folder_has_what_others_can_read(exported: Path) -> None:
    assert {path.name for path in exported.iterdir()} == FILES
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o044 == 0o044 for path in exported.iterdir())
    assert not list(exported.parent.glob(".*"))


def test_stock_openclip_loads_softmax_and_names_the_plugin_for_linear(exported: Path, tmp_path: Path) -> None:
    config = write_model_config(tmp_path / "ViT-soft.json", None)
    open_clip.add_model_config(config)
    weights, out = tmp_path / "soft.pt", tmp_path / "soft"
    torch.save({"state_dict": open_clip.create_model("ViT-soft").state_dict()}, weights)
    assert main(["export", "--model", "ViT-soft", "--pretrained", str(weights), "--out", str(out)]) == 0
    assert "attention" not in (out / "open_clip_config.json").read_text()
    command = [sys.executable, "-c", STOCK_LOAD, str(out), str(exported)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    bundle = load_model(ModelChoice(model="ViT-soft", pretrained=str(weights)), "cpu")
    expected = bundle.model.encode_text(bundle.tokenizer(["red"])).double().sum().item()
    assert float(done.stdout) == expected
    assert done.returncode != 0
    assert "unexpected keyword argument 'requires_import_clip_la'" in done.stderr.splitlines()[-1]
    card = (out / "README.md").read_text()
    assert "softmax_n(q_i.k_n" in card
    assert "clip_la" not in card.split("## Training")[0]


def test_the_card_has_the_run_s_figures(exported: Path, run_folder: Path) -> None:
    card = (exported / "README.md").read_text()
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    zeroshot = [line for line in lines if line.get("name", "").startswith("zeroshot")][-1]["metrics"]
    assert f"| Samples seen | {SAMPLES} of {SAMPLES} planned |" in card
    top1, low, high = (f"{100 * zeroshot[key]:.1f} %" for key in ("top1", "top1_low", "top1_high"))
    assert f"top-1 {top1} [95 %: {low} to {high}]; 4 images, 4 classes" in card
    assert "o_i = 1/N sum_n (1 + g_h q^_i.k^_n) v_n" in card
    assert "import clip_la" in card
    assert f"torch {torch.__version__.split('+')[0]}" in card
    assert re.search(r"\| Training loss, smoothed \| \d\.\d{3} \|", card)
    assert "library_name: open_clip" in card


def test_what_only_a_person_knows_is_marked_or_given(
    exported: Path, run_folder: Path, tmp_path: Path
) -> None:
    card = (exported / "README.md").read_text()
    assert card.count("**TO FILL IN:**") == 4
    assert "One run with seed 0" in card
    assert "not finished" not in card
    (tmp_path / "about.md").write_text("## Intended use\n\nTests of colours.\n")
    flags = ["--out", str(tmp_path / "out"), "--about", str(tmp_path / "about.md")]
    assert main(["export", str(run_folder), *flags]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Tests of colours." in card
    assert "TO FILL IN" not in card
    assert (
        main(["export", str(run_folder), "--out", str(tmp_path / "b"), "--about", "absent.md"]) == EXIT_USAGE
    )


def test_the_card_holds_no_private_path(exported: Path, run_folder: Path) -> None:
    card = (exported / "README.md").read_text()
    assert str(run_folder.parent) not in card
    assert "/00000.tar" in card


def test_figures_after_the_checkpoint_are_left_out(run_folder: Path, tmp_path: Path) -> None:
    run = shutil.copytree(run_folder, tmp_path / "run")
    line = {"type": "eval", "time": time.time(), "metrics": {"top1": 0.25}}
    late = {**line, "samples": 10 * SAMPLES, "name": "late"}
    early = {**line, "samples": SAMPLES, "name": "zeroshot/watched"}
    (run / "evals.jsonl").write_text("\n".join([json.dumps(early), '{"torn', json.dumps(late)]))
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "zeroshot/watched" in card
    assert "| late |" not in card


def test_a_damaged_log_leaves_a_card_without_figures(
    run_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = shutil.copytree(run_folder, tmp_path / "run")
    (run / "metrics.jsonl").write_text("[]\n{}\n")
    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    assert "the model card has no figures of the run" in caplog.text
    assert "| Training loss, smoothed | - |" in (tmp_path / "out" / "README.md").read_text()


def test_safetensors_alone(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sub" / "weights.safetensors"
    assert main(["export", str(run_folder), "--safetensors", str(path)]) == 0
    open_clip.add_model_config(write_model_config(tmp_path / "ViT-twin.json", RECOMMENDED))
    model = open_clip.create_model("ViT-twin", pretrained=str(path)).eval()
    images = torch.rand(2, 3, 32, 32)
    assert torch.equal(model.encode_image(images), load_bundle(run_folder).model.encode_image(images))
    assert [item.name for item in path.parent.iterdir()] == [path.name]
    assert main(["export", str(run_folder), "--safetensors", str(path)]) == EXIT_FAILED
    assert "already there" in capsys.readouterr().err
    assert main(["export", str(run_folder), "--safetensors", str(path), "--force"]) == 0
    assert main(["export", str(run_folder), "--safetensors", str(tmp_path / "w.bin")]) == EXIT_FAILED
    assert "must end in .safetensors" in capsys.readouterr().err


def test_what_is_there_is_not_overwritten(
    exported: Path, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(exported, tmp_path / "out")
    before = (out / "open_clip_model.safetensors").stat().st_ino
    assert main(["export", str(run_folder), "--out", str(out)]) == EXIT_FAILED
    assert "already holds an export" in capsys.readouterr().err
    assert (out / "open_clip_model.safetensors").stat().st_ino == before
    (out / "stale.safetensors").write_bytes(b"")
    assert main(["export", str(run_folder), "--out", str(out), "--force"]) == 0
    assert {path.name for path in out.iterdir()} == FILES
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter1.tex").write_text("years of work")
    assert main(["export", str(run_folder), "--out", str(thesis), "--force"]) == EXIT_FAILED
    assert "no earlier export" in capsys.readouterr().err
    assert (thesis / "chapter1.tex").read_text() == "years of work"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["export", str(run_folder), "--out", str(empty)]) == 0


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: 28")])
def test_a_full_disk_leaves_nothing(
    error: Exception,
    exported: Path,
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old = shutil.copytree(exported, tmp_path / "old")

    def save_half(tensors: object, path: Path, metadata: object) -> None:
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr(hub, "save_file", save_half)
    for flags in (
        ["--out", str(tmp_path / "new")],
        ["--out", str(old), "--force"],
        ["--safetensors", str(tmp_path / "w.safetensors")],
    ):
        assert main(["export", str(run_folder), *flags]) == EXIT_FAILED
        assert "can't write" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert {path.name for path in old.iterdir()} == FILES


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ([], EXIT_USAGE, "give either a checkpoint"),
        (["--model", "ViT-nano-8-LA", "--out", "x"], EXIT_USAGE, "has random weights"),
        (["--model", "ViT-nano-8-LA", "--pretrained", "nope", "--out", "x"], EXIT_FAILED, "can't be loaded"),
        (["missing", "--out", "x"], EXIT_FAILED, "no checkpoint at missing"),
        (["text.pt", "--out", "x"], EXIT_FAILED, "can't be read"),
        (["weights.pt", "--out", "x"], EXIT_FAILED, "needs --model NAME --pretrained FILE"),
        (["empty", "--out", "x"], EXIT_FAILED, "no readable checkpoint in"),
        (["text.pt"], EXIT_USAGE, "nothing to write"),
        (["text.pt", "--safetensors", "a.safetensors", "--onnx"], EXIT_USAGE, "need --out DIR"),
        (["text.pt", "--out", "x", "--public"], EXIT_USAGE, "--public belongs to --push-to-hub"),
        (["text.pt", "--pretrained", "y", "--out", "x"], EXIT_USAGE, "--pretrained belongs to --model"),
    ],
)
def test_what_can_t_be_exported(
    flags: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.pt").write_text("not a checkpoint")
    (tmp_path / "empty").mkdir()
    torch.save({"state_dict": {"a": torch.zeros(1)}}, tmp_path / "weights.pt")
    assert main(["export", *flags]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_hub_folder_without_weights_is_refused(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(exported, tmp_path / "bare")
    (tmp_path / "bare" / "open_clip_model.safetensors").unlink()
    assert main(["export", str(tmp_path / "bare"), "--out", str(tmp_path / "x")]) == EXIT_FAILED
    assert "can't be loaded" in capsys.readouterr().err
