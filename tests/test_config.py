"""Run configs: inheritance, types, near matches, refusals; and every config that ships."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import open_clip
import pytest
from open_clip_train.params import parse_args

import clip_la
from clip_la.config import UNSUPPORTED_FLAGS, ConfigError, RunConfig
from clip_la.config_sources import load_run_config, read_yaml, write_yaml

REPO_ROOT = Path(__file__).resolve().parents[1]
SHIPPED = sorted((REPO_ROOT / "configs").rglob("*.yaml"))
RUNS = [path for path in SHIPPED if "model" in read_yaml(path)]


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_command_line_wins_over_file_and_file_over_base(tmp_path: Path) -> None:
    write(tmp_path, "lr: 1e-3\nbatch-size: 8\nepochs: 3\n", "base.yaml")
    path = write(tmp_path, "base: base.yaml\nbatch_size: 16\nepochs: 4\n")
    config = load_run_config(path, {"epochs": "5"})
    assert (config.lr, config.batch_size, config.epochs) == (1e-3, 16, 5)
    assert config.name == "run"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch-sise: 8", r"unknown setting --batch-sise; did you mean --batch-size"),
        ("horovod: true", r"--horovod is not supported here: this trainer uses torch.distributed"),
        ("lr: fast", r"--lr is 'fast'; expected a number"),
        ("batch-size: 1.5", r"--batch-size is 1.5; expected a whole number"),
        ("batch-size: 0", r"--batch-size is 0; expected more than 0"),
        ("workers: -1", r"--workers is -1; expected 0 or more"),
        ("siglip: 3", r"--siglip is 3; expected true or false"),
        ("precision: fp8", r"--precision is 'fp8'; expected one of 'fp32'"),
        ("precision: pure_bf16", r"expected one of"),
        ("gather-with-grad: false", r"--local-loss needs --gather-with-grad"),
        ("attention: {kind: eq9}", r"attention.kind is 'eq9'; expected one of softmax, eq4, eq7"),
        ("attention: {kind: eq4, scale: length}", r"scale = 'length' has no meaning for eq4"),
        ("classnames: somewhere", r"--classnames belongs to --zeroshot"),
        ("lr-scheduler: const-cooldown", r"needs --epochs-cooldown"),
        ("seed: ", r"--seed can't be empty"),
        ("lr: 1\nlr: 2", r"given twice: lr"),
        ("- lr", r"holds a list; expected `key: value` lines"),
        ("lr: [", r"is not valid YAML"),
        ("base: missing.yaml", r"can't read config .*missing.yaml"),
        ("base: run.yaml", r"goes round in a circle"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_config(write(tmp_path, text), {})


def test_attention_is_a_mapping_a_json_text_or_a_kind() -> None:
    for attention in ({"kind": "eq7", "scale": "length"}, '{"kind": "eq7", "scale": "length"}'):
        assert load_run_config(None, {"attention": attention}).attention == {"kind": "eq7", "scale": "length"}
    assert load_run_config(None, {"attention": "eq4"}).attention == {"kind": "eq4"}


def test_aug_cfg_as_openclip_spells_it() -> None:
    config = load_run_config(None, {"aug_cfg": ["scale=(0.5, 1.0)", "use_timm=True"]})
    assert config.aug_cfg == {"scale": (0.5, 1.0), "use_timm": True}


def test_written_config_reads_back_equal(tmp_path: Path) -> None:
    config = load_run_config(
        None, {"name": "x", "image_mean": ["0.5", "0.5", "0.5"], "lr": "1e-5", "attention": "eq7"}
    )
    write_yaml(config, tmp_path / "config.yaml")
    assert load_run_config(tmp_path / "config.yaml", {}) == config


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().lr = 1.0  # type: ignore[misc]


def test_every_openclip_flag_is_known_or_refused_by_name() -> None:
    ours = {entry.name for entry in dataclasses.fields(RunConfig)} | set(UNSUPPORTED_FLAGS)
    assert set(vars(parse_args(["--model", "ViT-B-16"]))) - ours == set()


def test_defaults_are_openclips() -> None:
    """Where a default differs on purpose, it is listed here."""
    theirs = vars(parse_args(["--model", "ViT-B-16"]))
    on_purpose: dict[str, Any] = {
        "model": "ViT-B-16-LA",
        "precision": "amp_bf16",
        "device": "auto",
        "logs": "logs",
        "wandb_project_name": "clip_la",
        "pretrained": None,
        "aug_cfg": None,
        "local_loss": True,
        "gather_with_grad": True,
    }
    for entry in dataclasses.fields(RunConfig):
        if entry.name in theirs and entry.name not in on_purpose:
            assert entry.default == theirs[entry.name], entry.name
    assert {name: getattr(RunConfig(), name) for name in on_purpose} == on_purpose


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_shipped_config_loads(path: Path) -> None:
    config = load_run_config(path, {})
    assert config.model in open_clip.list_models()


def read_base(path: Path) -> str:
    return path.read_text(encoding="utf-8").splitlines()[0]


def _untyped(path: Path) -> str:
    """A file's name without its kind of attention: vit-b-16-la-eq4-1b -> vit-b-16-1b."""
    return re.sub(r"(softmax|la-eq4|la-gain|la-centred|la)(?=-|$)", "", path.stem)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_shipped_run_differs_from_its_siblings_in_one_line(path: Path) -> None:
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")
    ]
    assert [line.split(":")[0] for line in lines] == ["base", "model"]
    model = load_run_config(path, {}).model
    twins = [other for other in RUNS if other.parent == path.parent and _untyped(other) == _untyped(path)]
    assert len(twins) >= 3, "softmax and at least two kinds of linear attention"
    assert {read_base(twin) for twin in twins} == {read_base(path)}, "twins share their base"
    assert len(
        {load_run_config(twin, {}).model.removeprefix(model.split("-LA")[0]) for twin in twins}
    ) == len(twins)


KINDS = ("", "-LA", "-LA-eq4", "-LA-gain", "-LA-centred")


def test_laion_runs_cover_every_size_and_attention_with_one_global_batch() -> None:
    configs = [load_run_config(path, {}) for path in RUNS if path.parent.name == "laion400m"]
    expected = {f"ViT-{size}-16{kind}" for size in "SBL" for kind in KINDS}
    assert {config.model for config in configs} == expected
    # Apart from the model and what saves memory, all are one run.
    memory = {"model": "", "name": "", "grad_checkpointing": False}
    assert len({dataclasses.replace(config, **memory) for config in configs}) == 1


def test_short_and_paper_runs_are_the_full_ones_but_for_what_they_say() -> None:
    full = load_run_config(REPO_ROOT / "configs/laion400m/vit-b-16-la.yaml", {})
    for length, samples in {"1b": 1e9, "3b": 3e9}.items():
        short = load_run_config(REPO_ROOT / f"configs/laion400m/short/vit-b-16-la-{length}.yaml", {})
        assert short.epochs * (short.train_num_samples or 0) == samples
        same = {name: getattr(full, name) for name in ("epochs", "train_num_samples", "name")}
        assert dataclasses.replace(short, **same) == full
    names = [load_run_config(path, {}).name for path in RUNS if "laion400m" in str(path)]
    assert len(set(names)) == len(names), "two configs would share a run folder"


def test_model_config_files_are_valid_json() -> None:
    for path in (Path(clip_la.__file__).parent / "model_configs").glob("*.json"):
        assert {"embed_dim", "vision_cfg", "text_cfg"} <= set(json.loads(path.read_text()))
