"""`clip-la` as a person types it: commands, exit codes, messages."""

from __future__ import annotations

import json
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from clip_la.cli import build_parser, main
from clip_la.exit_codes import EXIT_FAILED, EXIT_USAGE

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 220)}


def png(colour: tuple[int, int, int]) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (32, 32), colour).save(buffer, "PNG")
    return buffer.getvalue()


def write_shard(path: Path, members: dict[str, bytes]) -> str:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, BytesIO(data))
    return str(path)


@pytest.fixture
def good_shard(tmp_path: Path) -> str:
    members = {}
    for index, (name, colour) in enumerate(list(COLOURS.items()) * 4):
        members |= {f"{index:09d}.jpg": png(colour), f"{index:09d}.txt": name.encode()}
    return write_shard(tmp_path / "00000.tar", members)


@pytest.fixture
def zeroshot_tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    for name, colour in COLOURS.items():
        (tree / name).mkdir(parents=True)
        (tree / name / "one.png").write_bytes(png(colour))
    (tmp_path / "classnames.txt").write_text("\n".join(COLOURS))
    return tree


@pytest.fixture
def tiny_model(tmp_path: Path) -> str:
    path = tmp_path / "ViT-tiny-LA.json"
    config = {
        "embed_dim": 32,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "patch_size": 8, "head_width": 32},
        "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 32, "heads": 1, "layers": 1},
        "attention": {"kind": "eq7"},
    }
    path.write_text(json.dumps(config))
    return str(path)


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    commands = next(a.choices for a in build_parser()._actions if isinstance(a.choices, dict))
    assert {"train", "eval", "check", "demo-data", "report", "fit", "runs", "models"} <= set(commands)
    for command in commands:
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
        shown = capsys.readouterr().out
        assert command in shown
        assert "exit codes:" in shown


def test_models_are_listed_with_their_attention(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert "ViT-B-16-LA-gain     attention eq7 (scale=length, gain=learned)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch-sise", "8"], "unknown setting --batch-sise; did you mean --batch-size"),
        (["--horovod"], "--horovod is not supported here"),
        (["--imagenet-val", "dir"], "--imagenet-val is not supported here: use --zeroshot"),
        (["--config", "missing.yaml"], "can't read config missing.yaml"),
        (["--lr", "fast", "--name", "x"], "--lr is 'fast'; expected a number"),
        (["--name", "x"], "no training data; give --train-data"),
        (["--train-data", "x.tar"], "the run has no name"),
    ],
)
def test_train_says_what_is_wrong_with_the_command_line(
    flags: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--device", "cpu", *flags]) == EXIT_USAGE
    assert message in capsys.readouterr().err


def test_train_names_a_model_that_is_nearly_right(
    good_shard: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--model",
        "ViT-B16-LA",
        "--train-data",
        good_shard,
        "--logs",
        str(tmp_path / "logs"),
        "--name",
        "x",
    ]
    assert main(["train", *flags]) == EXIT_FAILED
    assert "did you mean ViT-B-16-LA" in capsys.readouterr().err


def test_train_then_eval_report_and_runs(
    good_shard: str, zeroshot_tree: Path, tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    classnames = ["--classnames", str(tmp_path / "classnames.txt")]
    flags = [
        "--model",
        tiny_model,
        "--train-data",
        good_shard,
        "--train-num-samples",
        "12",
        "--batch-size",
        "6",
    ]
    flags += ["--epochs", "3", "--warmup", "1", "--workers", "0", "--lr", "1e-3", "--precision", "fp32"]
    flags += [
        "--zeroshot",
        str(zeroshot_tree),
        *classnames,
        "--templates",
        "plain",
        "--log-every-n-steps",
        "1",
    ]
    flags += ["--val-data", good_shard, "--val-block-size", "4", "--logs", str(logs), "--name", "tiny"]
    assert main(["train", *flags, "--device", "cpu"]) == 0
    result = tmp_path / "result.json"
    evaluate = ["eval", "--checkpoint", str(logs / "tiny"), "--zeroshot", str(zeroshot_tree), *classnames]
    assert (
        main([*evaluate, "--templates", "plain", "--json", str(result), "--workers", "0", "--device", "cpu"])
        == 0
    )
    shown = capsys.readouterr().out
    assert "ViT-tiny-LA, eq7, fp32" in shown
    records = [json.loads(line) for line in (logs / "tiny" / "metrics.jsonl").read_text().splitlines()]
    trained = [r["metrics"] for r in records if r["type"] == "eval" and r["name"].startswith("zeroshot")]
    assert json.loads(result.read_text())["metrics"] == trained[-1]
    assert [r["metrics"]["num_negatives"] for r in records if r.get("name") == "validation"] == [3, 3, 3]
    assert main(["report", str(logs / "tiny"), "--out", str(tmp_path / "report")]) == 0
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
    assert main(["runs", str(logs)]) == 0
    assert "finished" in capsys.readouterr().out


def test_eval_says_what_is_wrong(
    tmp_path: Path, zeroshot_tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.pt").write_text("not a checkpoint")
    flags = [
        "--zeroshot",
        str(zeroshot_tree),
        "--classnames",
        str(tmp_path / "classnames.txt"),
        "--device",
        "cpu",
    ]
    for path, message in {
        "missing.pt": "no checkpoint at",
        "text.pt": "can't be read",
        "tree": "no readable checkpoint in",
    }.items():
        assert main(["eval", "--checkpoint", str(tmp_path / path), *flags]) == EXIT_FAILED
        assert message in capsys.readouterr().err


def test_check_tells_good_shards_from_bad(
    good_shard: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", good_shard, "--workers", "0"]) == 0
    assert "12 usable pairs of 12" in capsys.readouterr().out
    bad = write_shard(
        tmp_path / "bad.tar", {"a.jpg": png((1, 2, 3)), "a.txt": b"fine", "b.jpg": b"", "b.txt": b"empty"}
    )
    found = tmp_path / "found.json"
    assert main(["check", bad, "--workers", "0", "--json", str(found)]) == EXIT_FAILED
    shown = capsys.readouterr().out
    assert "1 usable pairs of 2" in shown
    assert "image_empty" in shown
    assert json.loads(found.read_text())["losses"] == {"image_empty": 1}
    assert main(["check", str(tmp_path / "no_such.tar"), "--workers", "0"]) == EXIT_FAILED


def test_a_run_without_a_usable_sample_stops_and_says_why(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = {}
    for n in range(4):
        members |= {f"{n}.jpg": b"", f"{n}.txt": b"x"}
    bad = write_shard(tmp_path / "bad.tar", members)
    flags = ["--model", tiny_model, "--train-data", bad, "--train-num-samples", "4", "--batch-size", "2"]
    flags += ["--logs", str(tmp_path / "logs"), "--name", "x", "--workers", "0", "--device", "cpu"]
    assert main(["train", *flags]) == EXIT_FAILED
    assert "4 image_empty" in capsys.readouterr().err
