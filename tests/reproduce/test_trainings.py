"""Many trainings at a time: skipped when finished, continued when stopped, refused when they can't be right.

Most tests have a stand-in for `clip-la train`, which takes seconds to start; the slow ones train.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clip_la.config import ConfigError
from clip_la.exit_codes import EXIT_STOPPED
from clip_la.reproduce import child
from clip_la.reproduce.trainings import Training, TrainingFailedError, TrainingsStoppedError, train_all
from tiny_run import RECOMMENDED, colour_shard, write_model_config

STAND_IN = """
import json, shutil, signal, sys, time
from pathlib import Path
import yaml

def say(kind, samples, **more):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"type": kind, "samples": samples, "time": time.time(), **more}) + "\\n")

def stop(number, frame):
    say("run_end", samples, reason="SIGTERM")
    sys.exit(75)

settings = Path(sys.argv[1])
config = yaml.safe_load(settings.read_text())
folder = Path(config["logs"]) / config["name"]
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
shutil.copy(settings, folder / "config.yaml")
saved = folder / "checkpoints" / "samples"
samples = int(saved.read_text()) if saved.exists() else 0
say("run_start", samples, resumed=samples > 0)
signal.signal(signal.SIGTERM, stop)
total = config["train_num_samples"] * config["epochs"]
while samples < total:
    if config["seed"] == 13:
        print("no such shard: unlucky.tar")
        sys.exit(1)
    if config["seed"] == 14:
        say("run_end", samples, reason="non_finite")
        sys.exit(3)
    samples += 10
    saved.write_text(str(samples))
    say("train", samples, loss=1.0)
    time.sleep(config["lr"])
say("run_end", samples, reason="finished")
"""

MAIN = """
import json, logging, sys
from pathlib import Path
from clip_la.errors import ExpectedError
from clip_la.reproduce.trainings import Training, train_all

logging.basicConfig(level=logging.INFO)
logs, trainings = Path(sys.argv[1]), json.loads(sys.argv[2])
try:
    train_all([Training(**training) for training in trainings], logs)
except ExpectedError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(child, "train_command", lambda settings: [sys.executable, str(script), str(settings)])


def training(name: str, *, seed: int = 0, seconds_a_step: float = 0.0, num_samples: int = 40) -> Training:
    return Training(name, {"train_num_samples": num_samples, "epochs": 1, "seed": seed, "lr": seconds_a_step})


def lines_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["type"] == kind]


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it didn't come"
        time.sleep(0.02)


@pytest.mark.usefixtures("stand_in")
def test_all_finish_in_the_order_given_and_are_not_run_again(tmp_path: Path) -> None:
    trainings = [training(name) for name in ("a", "b", "c")]
    folders = train_all(trainings, tmp_path / "logs")
    assert [folder.name for folder in folders] == ["a", "b", "c"]
    train_all(trainings, tmp_path / "logs", keep_checkpoints=False)
    for folder in folders:
        assert len(lines_of(folder, "run_start")) == 1
        assert lines_of(folder, "run_end")[-1]["reason"] == "finished"
        assert not (folder / "checkpoints").exists()


@pytest.mark.usefixtures("stand_in")
def test_no_more_run_at_once_than_asked_for(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    train_all([training(name, seconds_a_step=0.1) for name in ("a", "b", "c")], logs, processes=1)
    spans = [
        (lines_of(logs / n, "run_start")[0]["time"], lines_of(logs / n, "run_end")[0]["time"]) for n in "abc"
    ]
    assert spans[0][1] <= spans[1][0]
    assert spans[1][1] <= spans[2][0]


@pytest.mark.usefixtures("stand_in")
def test_a_failure_names_the_training_its_last_words_and_stops_the_others(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    others = training("slow", seconds_a_step=0.05, num_samples=10_000)
    with pytest.raises(TrainingFailedError) as failure:
        train_all([others, training("bad", seed=13), training("never")], logs)
    message = str(failure.value)
    assert "training bad ended with exit code 1" in message
    assert "no such shard: unlucky.tar" in message
    assert "run the same command again" in message
    assert lines_of(logs / "slow", "run_end")[-1]["reason"] == "SIGTERM"
    assert not (logs / "never").exists()


@pytest.mark.usefixtures("stand_in")
def test_a_sweep_goes_on_past_a_training_that_was_not_finite(tmp_path: Path) -> None:
    logs, trainings = tmp_path / "logs", [training("diverges", seed=14), training("fine")]
    with pytest.raises(TrainingFailedError, match="lower its learning rate"):
        train_all(trainings, logs, processes=1)
    assert not (logs / "fine").exists()
    train_all(trainings, logs, accept_non_finite=True)
    assert lines_of(logs / "fine", "run_end")[-1]["reason"] == "finished"
    assert len(lines_of(logs / "diverges", "run_start")) == 1  # it is known how it ends


@pytest.mark.usefixtures("stand_in")
def test_a_stop_saves_and_the_same_call_goes_on(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    trainings = [training("a", seconds_a_step=0.1, num_samples=60), training("b", num_samples=20)]
    parent = os.getpid()
    watcher = subprocess.Popen(
        ["sh", "-c", f"while ! [ -e {logs}/a/checkpoints/samples ]; do sleep 0.05; done; kill {parent}"]
    )
    with pytest.raises(TrainingsStoppedError) as stopped:
        train_all(trainings, logs, processes=1)
    watcher.wait()
    assert stopped.value.exit_code == EXIT_STOPPED
    reached = lines_of(logs / "a", "run_end")[-1]["samples"]
    assert 0 < reached < 60
    train_all(trainings, logs, processes=1)
    assert lines_of(logs / "a", "run_start")[-1]["samples"] == reached
    assert lines_of(logs / "b", "run_end")[-1]["samples"] == 20


@pytest.mark.usefixtures("stand_in")
@pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel tells children of their parent's death on Linux"
)
def test_trainings_save_when_what_started_them_is_killed(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    pid = os.fork()
    if pid == 0:
        train_all([training("a", seconds_a_step=0.05, num_samples=100_000)], logs)
        os._exit(0)
    wait_for(lambda: (logs / "a" / "checkpoints" / "samples").exists())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_for(lambda: bool(lines_of(logs / "a", "run_end")))
    assert lines_of(logs / "a", "run_end")[-1]["reason"] == "SIGTERM"


@pytest.mark.usefixtures("stand_in")
def test_a_folder_with_other_settings_is_refused_before_anything_starts(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    train_all([training("a")], logs)
    with pytest.raises(ConfigError, match=r"a was trained with other settings: seed 0, now 1"):
        train_all([training("b"), training("a", seed=1)], logs)
    assert not (logs / "b").exists()


def test_settings_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--batch-sizes; did you mean"):
        train_all([Training("a", {"train_num_samples": 8, "batch_sizes": 4})], tmp_path)
    with pytest.raises(ConfigError, match="a has no train_num_samples"):
        train_all([Training("a", {})], tmp_path)
    with pytest.raises(ConfigError, match="trainings with one name: a"):
        train_all([training("a"), training("a")], tmp_path)


@pytest.mark.slow
def test_real_trainings_killed_and_continued_are_the_same_to_the_bit(tmp_path: Path) -> None:
    colour_shard(tmp_path / "00000.tar")
    flags = {
        "model": str(write_model_config(tmp_path / "ViT-tiny.json", RECOMMENDED)),
        "train_data": str(tmp_path / "00000.tar"),
        "train_num_samples": 16, "epochs": 40, "batch_size": 8, "warmup": 1, "precision": "fp32",
        "workers": 0, "device": "cpu", "log_every_n_steps": 1, "save_every_samples": 8,
    }  # fmt: skip
    (straight,) = train_all([Training("a", flags)], tmp_path / "straight")
    logs = tmp_path / "killed"
    command = [sys.executable, "-c", MAIN, str(logs), json.dumps([{"name": "a", "flags": flags}])]
    killed = subprocess.Popen(command)
    wait_for(lambda: (logs / "a" / "metrics.jsonl").exists() and len(lines_of(logs / "a", "train")) > 10)
    killed.kill()
    killed.wait()
    time.sleep(2)  # the training saves and lets go of its folder
    assert subprocess.run(command, check=False).returncode == 0
    assert len(lines_of(logs / "a", "run_start")) == 2
    last = {folder: lines_of(folder, "train")[-1]["loss"] for folder in (straight, logs / "a")}
    assert last[straight] == last[logs / "a"]


@pytest.mark.slow
def test_what_training_says_of_a_mistake_is_shown(tmp_path: Path) -> None:
    flags = {"train_num_samples": 8, "train_data": str(tmp_path / "missing.tar"), "workers": 0}
    with pytest.raises(TrainingFailedError, match=r"(?s)training a ended with exit code \d.*missing\.tar"):
        train_all([Training("a", flags)], tmp_path / "logs")
