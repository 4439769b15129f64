"""Each kept checkpoint is evaluated once, until the run has ended."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from clip_la.checkpoint import CheckpointError
from clip_la.cli import main
from clip_la.cluster.watch import has_ended, watch
from clip_la.distributed import World
from clip_la.report.watched import EVALS_FILE, read_evals

ALONE = World(0, 0, 1, torch.device("cpu"))


def keep(run: Path, epoch: int) -> None:
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / f"epoch_{epoch:04d}_{epoch * 10:014d}.pt").touch()


def end(run: Path, reason: str = "finished") -> None:
    (run / "metrics.jsonl").write_text(json.dumps({"type": "run_end", "reason": reason}) + "\n")


def evaluate(path: Path) -> dict[str, Any]:
    if "epoch_0002" in path.name:
        raise CheckpointError("damaged")
    return {"top1": 0.5}


def results(run: Path) -> list[tuple[str, int]]:
    return [(line["type"], line["samples"]) for line in read_evals(run)]


def test_oldest_first_and_each_once(tmp_path: Path) -> None:
    for epoch in (3, 1, 2):
        keep(tmp_path, epoch)
    (tmp_path / "checkpoints" / "rolling_00000000000015.pt").touch()
    end(tmp_path)
    assert watch(tmp_path, "zeroshot/x", evaluate, ALONE) == 3
    assert results(tmp_path) == [("eval", 10), ("eval_failed", 20), ("eval", 30)]
    keep(tmp_path, 4)
    assert watch(tmp_path, "zeroshot/x", evaluate, ALONE) == 1
    assert results(tmp_path)[3:] == [("eval", 40)]


def test_several_evaluations_of_one_run(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    end(tmp_path)
    assert watch(tmp_path, "zeroshot/x", evaluate, ALONE) == 1
    assert watch(tmp_path, "zeroshot/y", evaluate, ALONE) == 1
    assert [line["name"] for line in read_evals(tmp_path)] == ["zeroshot/x", "zeroshot/y"]


def test_a_line_torn_by_a_kill_costs_that_line_only(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    end(tmp_path)
    (tmp_path / EVALS_FILE).write_text('{"type": "eval", "samples": 1')
    assert watch(tmp_path, "zeroshot/x", evaluate, ALONE) == 1
    assert results(tmp_path) == [("eval", 10)]


def test_waits_for_a_run_that_is_under_way(tmp_path: Path) -> None:
    counts: list[int] = []
    watcher = threading.Thread(
        target=lambda: counts.append(watch(tmp_path, "zeroshot/x", evaluate, ALONE, poll_seconds=0.01))
    )
    watcher.start()
    time.sleep(0.05)
    end(tmp_path, "SIGTERM")  # stopped, to be continued
    time.sleep(0.05)
    assert watcher.is_alive()
    keep(tmp_path, 1)
    end(tmp_path)
    watcher.join(30)
    assert counts == [1]


def test_ended_only_where_the_last_line_says_so(tmp_path: Path) -> None:
    assert not has_ended(tmp_path, 1)
    end(tmp_path, "SIGUSR1")
    assert not has_ended(tmp_path, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"type": "run_e')
    assert not has_ended(tmp_path, 1)
    end(tmp_path, "non_finite")
    assert has_ended(tmp_path, 1)


def test_a_run_that_nobody_trains_any_more_is_watched_no_longer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(tmp_path, 1)
    end(tmp_path, "SIGTERM")
    two_hours_ago = time.time() - 7200
    os.utime(tmp_path / "metrics.jsonl", (two_hours_ago, two_hours_ago))
    assert not has_ended(tmp_path, 3)
    assert watch(tmp_path, "zeroshot/x", evaluate, ALONE, patience_hours=1) == 1
    assert "has been silent for 2.0 hours" in caplog.text


def test_command_of_a_run_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end(tmp_path)
    flags = ["--zeroshot", str(tmp_path), "--classnames", "imagenet-1k", "--device", "cpu"]
    assert main(["watch", str(tmp_path), *flags]) == 0
    assert capsys.readouterr().out == "0 checkpoint(s) evaluated\n"
