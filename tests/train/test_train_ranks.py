"""Two processes on CPU (gloo): the same gradient as one, runs that continue, a rank that dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clip_la import checkpoint
from clip_la.config import RunConfig
from clip_la.config_sources import write_yaml
from clip_la.exit_codes import EXIT_FAILED, EXIT_USAGE
from clip_la.peers import EXIT_PEER_FAILED
from clip_la.train.folder import run_folder
from clip_la.train.loop import EXIT_STOPPED

pytestmark = pytest.mark.slow
MakeConfig = Callable[..., RunConfig]

GRADIENTS = """
import sys, torch
from pathlib import Path
from clip_la.config_sources import load_run_config
from clip_la.distributed import init_world, leave_world
from clip_la.train.contrast import Micro
from clip_la.train.run import build_run
config = load_run_config(sys.argv[1], {"name": sys.argv[2]})
world = init_world("cpu")
run = build_run(config, world, Path(config.logs) / config.name)
images = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
texts = run.bundle.tokenizer([f"number {n} of many" for n in range(16)])
share = 16 // world.size
mine = slice(world.rank * share, (world.rank + 1) * share)
micro = share // config.accum_freq
micros = [Micro(i, t) for i, t in zip(images[mine].split(micro), texts[mine].split(micro))]
loss = world.sum(float(run.contrast.backward(run.model, micros, None)))[0] / world.size
if world.is_main:
    torch.save({"loss": loss, **{n: p.grad for n, p in run.bundle.model.named_parameters()}}, sys.argv[3])
leave_world()
"""


def launch(code: list[str], ranks: int, **popen: Any) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, *code],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **popen,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def wait(processes: list[subprocess.Popen[str]], seconds: float = 500) -> list[int]:
    outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    codes = [process.returncode for process in processes]
    print(*outputs, sep="\n-- next rank --\n")
    return codes


def config_file(config: RunConfig, folder: Path) -> str:
    path = folder / f"{config.name}.yaml"
    write_yaml(config, path)
    return str(path)


def state_of(config: RunConfig) -> dict[str, Any]:
    return checkpoint.read(
        checkpoint.list_checkpoints(Path(config.logs) / str(config.name) / "checkpoints")[0]
    )


def train_losses(config: RunConfig) -> dict[int, float]:
    lines = (Path(config.logs) / str(config.name) / "metrics.jsonl").read_text().splitlines()
    return {r["samples"]: r["loss"] for r in map(json.loads, lines) if r["type"] == "train"}


@pytest.mark.parametrize(
    "overrides",
    [{}, {"local_loss": False}, {"siglip": True}],
    ids=["local", "gather", "siglip"],
)
@pytest.mark.parametrize("accum_freq", [1, 2])
def test_gradients_of_two_ranks_equal_those_of_one(
    overrides: dict[str, bool], accum_freq: int, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(batch_size=8 // accum_freq, accum_freq=accum_freq, **overrides)
    single = make_config(batch_size=16, siglip=config.siglip)
    found, expected = tmp_path / "two.pt", tmp_path / "one.pt"
    two = launch(["-c", GRADIENTS, config_file(config, tmp_path), "two", str(found)], 2)
    assert wait(two) == [0, 0]
    assert wait(launch(["-c", GRADIENTS, config_file(single, tmp_path), "one", str(expected)], 1)) == [0]
    ours, theirs = torch.load(found), torch.load(expected)
    assert ours.pop("loss") == pytest.approx(theirs.pop("loss"), rel=1e-5)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("workers", [0, 1])
def test_two_ranks_killed_and_continued_equal_uninterrupted(
    workers: int, make_config: MakeConfig, tmp_path: Path
) -> None:
    common = {"batch_size": 8, "workers": workers}
    straight = make_config(**common, name="straight")
    killed = make_config(**common, name="killed", save_every_samples=48)
    command = ["-m", "clip_la.cli", "train", "--config"]
    assert wait(launch([*command, config_file(straight, tmp_path)], 2)) == [0, 0]
    path = config_file(killed, tmp_path)
    first = launch([*command, path], 2)
    log = Path(killed.logs) / "killed" / "metrics.jsonl"
    until(lambda: log.exists() and log.read_text().count('"train"') >= 5)
    for process in first:
        process.kill()
    wait(first)
    assert wait(launch([*command, path], 2)) == [0, 0]
    assert train_losses(killed) == train_losses(straight)
    ours, theirs = state_of(killed), state_of(straight)
    assert all(torch.equal(value, ours["state_dict"][key]) for key, value in theirs["state_dict"].items())


def test_a_signal_to_one_rank_stops_all_and_saves(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(batch_size=8, epochs=400, name="stopped")
    processes = launch(["-m", "clip_la.cli", "train", "--config", config_file(config, tmp_path)], 2)
    log = Path(config.logs) / "stopped" / "metrics.jsonl"
    until(lambda: log.exists() and log.read_text().count('"train"') >= 3)
    processes[1].send_signal(signal.SIGUSR1)
    assert wait(processes) == [EXIT_STOPPED, EXIT_STOPPED]
    assert state_of(config)["progress"]["samples"] >= 48


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_is_killed_ends_the_other_with_the_reason(
    dies: int, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(batch_size=8, epochs=4000, name="dead")
    processes = launch(["-m", "clip_la.cli", "train", "--config", config_file(config, tmp_path)], 2)
    log = Path(config.logs) / "dead" / "metrics.jsonl"
    until(lambda: log.exists() and log.read_text().count('"train"') >= 3)
    processes[dies].kill()
    survivor = processes[1 - dies]
    output = survivor.communicate(timeout=500)[0]
    assert survivor.returncode == EXIT_PEER_FAILED, output
    reason = f"rank {dies} is gone without giving a reason"
    assert output.splitlines()[-1].startswith(f"clip-la: {reason}"), output
    assert "Traceback" not in output
    if dies == 1:
        assert f"ended: {reason}" in (log.parent / "out.log").read_text()
    assert processes[dies].wait(60) == -signal.SIGKILL


FAIL_AT_STEP_3 = """
import sys
from clip_la.cli import main
from clip_la.train import loop
original = loop.step
def step(run, *args):
    if run.progress.step == 3 and run.world.rank == int(sys.argv[1]):
        raise MemoryError("no room on this rank")
    return original(run, *args)
loop.step = step
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("fails", [0, 1])
def test_a_rank_that_fails_ends_the_other_with_its_reason(
    fails: int, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(batch_size=8, epochs=4000, name="failed")
    command = ["-c", FAIL_AT_STEP_3, str(fails), "train", "--config", config_file(config, tmp_path)]
    processes = launch(command, 2)
    outputs = [process.communicate(timeout=500)[0] for process in processes]
    assert processes[fails].returncode == EXIT_FAILED, outputs
    assert outputs[fails].splitlines()[-1] == "clip-la: MemoryError: no room on this rank"
    assert processes[1 - fails].returncode == EXIT_PEER_FAILED, outputs
    expected = f"clip-la: rank {fails} failed: MemoryError: no room on this rank"
    assert outputs[1 - fails].splitlines()[-1] == expected
    assert "Traceback" not in outputs[1 - fails]


def test_a_folder_in_use_ends_every_rank(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(batch_size=8, name="used")
    with run_folder(config):
        processes = launch(["-m", "clip_la.cli", "train", "--config", config_file(config, tmp_path)], 2)
        outputs = [process.communicate(timeout=500)[0] for process in processes]
    assert [process.returncode for process in processes] == [EXIT_USAGE, EXIT_PEER_FAILED], outputs
    assert all(f"is in use by process {os.getpid()}" in output.splitlines()[-1] for output in outputs), (
        outputs
    )


def until(condition: Callable[[], bool], seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the run didn't get going"
        time.sleep(0.05)


def test_a_run_of_one_process_goes_on_under_torchrun_with_two(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """As documented: `--no-python --` keeps torchrun from taking --logs for an option of its own."""
    config = make_config(batch_size=16, epochs=2, name="grows")
    assert wait(launch(["-m", "clip_la.cli", "train", "--config", config_file(config, tmp_path)], 1)) == [0]
    command = ["torchrun", "--nproc-per-node", "2", "--standalone", "--no-python", "--", "clip-la", "train"]
    flags = [
        "--config",
        config_file(config, tmp_path),
        "--logs",
        config.logs,
        "--batch-size",
        "8",
        "--epochs",
        "4",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command + flags, capture_output=True, text=True, timeout=500, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert state_of(config)["progress"]["samples"] == 256
    assert len(state_of(config)["ranks"]) == 2
