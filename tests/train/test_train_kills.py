"""A run killed at any moment and run again ends as if nothing had happened."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from clip_la import checkpoint
from clip_la.config import RunConfig
from clip_la.exit_codes import EXIT_PEER_FAILED, EXIT_STOPPED
from clip_la.peers import PeerError
from clip_la.train.loop import train

pytestmark = pytest.mark.slow


def start(config: RunConfig, **environment: str) -> BaseProcess:
    # Forked, so that a start costs no imports and the kill comes early in the run.
    process = multiprocessing.get_context("fork").Process(target=_train, args=(config, environment))
    process.start()
    return process


def _train(config: RunConfig, environment: dict[str, str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment)
    try:
        code = train(config)
    except PeerError:
        code = EXIT_PEER_FAILED
    os._exit(code)


def start_ranks(config: RunConfig) -> list[BaseProcess]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [start(config, RANK=str(rank), **common) for rank in range(2)]


@pytest.fixture
def table(tmp_path: Path) -> str:
    """64 rows of pictures in files of their own."""
    rows = "filepath\ttitle\n"
    for number in range(64):
        path = tmp_path / f"{number}.png"
        Image.new("RGB", (32, 32), (4 * number, 128, 255 - 4 * number)).save(path)
        rows += f"{path}\tnumber {number} of many\n"
    (tmp_path / "table.tsv").write_text(rows)
    return str(tmp_path / "table.tsv")


def final_weights(config: RunConfig) -> dict[str, Any]:
    newest = checkpoint.list_checkpoints(Path(config.logs) / str(config.name) / "checkpoints")[0]
    content = checkpoint.read(newest)
    return {**content["state_dict"], "progress": content["progress"]}


@pytest.mark.parametrize(
    ("seed", "overrides"),
    [
        (0, {"workers": 0}),
        (1, {"workers": 2, "batch_size": 8, "accum_freq": 2}),
        (2, {"workers": 1, "precision": "amp_bf16", "dataset_resampled": True}),
    ],
)
def test_killed_at_random_moments(
    seed: int, overrides: dict[str, Any], make_config: Callable[..., RunConfig]
) -> None:
    # Saving at every step makes many of the kills fall into a save.
    common = {"epochs": 20, "save_every_samples": 16, "keep_last": 2, **overrides}
    straight, killed = make_config(**common, name="straight"), make_config(**common, name="killed")
    process = start(straight)
    began = time.monotonic()
    process.join(300)
    assert process.exitcode == 0
    duration = time.monotonic() - began
    rng = random.Random(seed)
    exits: list[int | None] = []
    for _ in range(40):
        process = start(killed)
        process.join(rng.uniform(0.2, 0.6) * duration)
        if process.exitcode is None:
            os.kill(
                process.pid or 0, rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
            )
            process.join(60)
        exits.append(process.exitcode)
        if exits[-1] == 0:
            break
    assert exits[-1] == 0, exits
    assert set(exits[:-1]) <= {-signal.SIGKILL, EXIT_STOPPED}, exits
    assert len(exits) > 2, "no kill came in time"
    ours, theirs = final_weights(killed), final_weights(straight)
    assert ours.pop("progress") == theirs.pop("progress")
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.parametrize(
    ("seed", "overrides"),
    [
        (3, {"workers": 2, "batch_size": 4, "accum_freq": 2, "dataset_resampled": True}),
        (4, {"workers": 1, "batch_size": 8, "train_data": "table"}),
    ],
    ids=["resampled", "table"],
)
def test_a_rank_of_two_is_killed_at_random_moments(
    seed: int, overrides: dict[str, Any], make_config: Callable[..., RunConfig], table: str
) -> None:
    """Either rank, by any signal; the other ends by itself, and the next start goes on."""
    if "train_data" in overrides:
        overrides = {**overrides, "train_data": table}
    common = {"epochs": 16, "save_every_samples": 16, "dist_timeout_minutes": 5.0, **overrides}
    straight, killed = make_config(**common, name="straight"), make_config(**common, name="killed")
    assert exit_codes(start_ranks(straight)) == [0, 0]
    rng = random.Random(seed)
    exits: list[list[int | None]] = []
    while not exits or exits[-1] != [0, 0]:
        ranks = start_ranks(killed)
        if len(exits) < 4:
            wait_for_steps(killed, rng.randint(2, 6), ranks[0])
            time.sleep(rng.uniform(0, 0.05))
            number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
            target = rng.choice(ranks)
            if target.is_alive():
                os.kill(target.pid or 0, number)
        exits.append(exit_codes(ranks))
        assert set(exits[-1]) <= {0, EXIT_STOPPED, EXIT_PEER_FAILED, -signal.SIGKILL}, exits
    assert len(exits) > 2, "no kill came in time"
    ours, theirs = final_weights(killed), final_weights(straight)
    assert ours.pop("progress") == theirs.pop("progress")
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def exit_codes(ranks: list[BaseProcess]) -> list[int | None]:
    for process in ranks:
        process.join(300)
    return [process.exitcode for process in ranks]


def wait_for_steps(config: RunConfig, number: int, process: BaseProcess) -> None:
    """Until a run has logged so many more steps."""
    log = Path(config.logs) / str(config.name) / "metrics.jsonl"
    before = log.read_text().count('"train"') if log.exists() else 0
    while process.is_alive() and (not log.exists() or log.read_text().count('"train"') < before + number):
        time.sleep(0.02)
