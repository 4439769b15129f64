"""What would make a job fail is found before it starts, and said with what to change."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from clip_la.cluster import preflight
from clip_la.cluster.preflight import PreflightError, config_from_arguments, problems, run_preflight
from clip_la.config import ConfigError


def found(config_file: Path, *flags: str, world_size: int = 1) -> list[str]:
    return list(problems(config_from_arguments([str(config_file), *flags]), world_size, sample=True))


def test_a_good_job_has_no_problem(config_file: Path) -> None:
    assert found(config_file, world_size=3) == []


@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    [
        (["--model", "ViT-nano-9"], 1, "no model named 'ViT-nano-9'"),
        (["--train-data", "nowhere/{00000..00002}.tar"], 1, "3 of 3 shards are not there"),
        ([], 4, "3 shards can't be shared by 4 readers"),
        (["--train-num-samples", "5", "--batch-size", "8"], 1, "fewer than one global batch of 8"),
        (["--pretrained", "missing.pt"], 1, "--pretrained is missing.pt, which is not there"),
        (
            ["--zeroshot", "no-tree", "--classnames", "imagenet-1k"],
            1,
            "one folder of images a class at no-tree",
        ),
        (["--val-data", "held/{00000..00003}.tar"], 1, "4 of 4 shards are not there, first held/00000.tar"),
    ],
)
def test_each_problem_is_named(config_file: Path, flags: list[str], world_size: int, message: str) -> None:
    messages = found(config_file, *flags, world_size=world_size)
    assert len(messages) == 1
    assert message in messages[0]


def test_a_model_that_cannot_be_estimated_is_trained_all_the_same(
    config_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert found(config_file, "--model", "RN50") == []
    assert "only native ViTs and text transformers can be estimated" in caplog.text


def test_flags_are_those_of_train(config_file: Path) -> None:
    assert config_from_arguments([str(config_file), "--lr", "2e-4", "--no-local-loss"]).lr == 2e-4
    with pytest.raises(ConfigError, match="did you mean --batch-size"):
        config_from_arguments([str(config_file), "--batch-sise", "3"])


def test_shards_without_a_usable_pair_are_read_before_the_job(config_file: Path, shard_folder: Path) -> None:
    for shard in shard_folder.glob("*.tar"):
        shard.write_bytes(b"\0" * 10240)
    messages = found(config_file)
    assert len(messages) == 1
    assert "nothing usable in a sample" in messages[0]


def test_a_full_disk_is_found(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10**8, 10**8))
    assert any("0.1 GiB free" in message and "two must fit" in message for message in found(config_file))


def test_starts_are_recorded_until_they_lead_nowhere(config_file: Path, tmp_path: Path) -> None:
    for restart in range(4):
        assert run_preflight([str(config_file)], 1, "77", restart) == tmp_path / "logs" / "run"
    with pytest.raises(PreflightError, match="giving up: 4 starts of job 77"):
        run_preflight([str(config_file)], 1, "77", 4)
    assert run_preflight([str(config_file)], 1, "78", 0)


def test_main_prints_the_folder_or_the_problem(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--job", "1", "--world-size", "1", "--", str(config_file)]
    assert preflight.main(arguments) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'logs' / 'run'}\n"
    assert preflight.main([*arguments, "--epochs", "0"]) == 2
    assert "clip-la: --epochs is 0; expected more than 0" in capsys.readouterr().err
