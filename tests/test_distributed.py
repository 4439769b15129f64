"""What the environment of a launcher means."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from clip_la.distributed import Launch, LaunchError, _set_rendezvous, gpu_of, init_world, read_launch


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Launch(0, 0, 1)),
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, Launch(5, 1, 8)),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}, Launch(3, 1, 4)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "8"}, Launch(1, 0, 2)),
        ({"SLURM_PROCID": "0"}, Launch(0, 0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, Launch(0, 0, 1)),
        (
            {"WORLD_SIZE": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"},
            Launch(3, 1, 4),
        ),
        ({"SLURM_NTASKS": "4"}, Launch(0, 0, 1)),  # the shell of salloc
        ({"WORLD_SIZE": "1"}, Launch(0, 0, 1)),
    ],
)
def test_launch_is_read_from_the_environment(env: dict[str, str], expected: Launch) -> None:
    assert read_launch(env) == expected


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"SLURM_PROCID": "3"}, "this is rank 3, but none of WORLD_SIZE, SLURM_STEP_NUM_TASKS"),
        ({"RANK": "3"}, "this is rank 3, but none of WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is 4, but neither RANK nor SLURM_PROCID"),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "2"}, r"this is rank 3, but there are 2 task\(s\)"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"this is rank 2, but there are 2 task\(s\)"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'; expected a whole number"),
    ],
)
def test_a_task_that_cannot_know_its_world_is_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        read_launch(env)


@pytest.mark.parametrize(
    ("env", "num_visible", "expected"),
    [
        ({}, 1, 0),
        ({}, 8, 0),
        ({"RANK": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}, 8, 1),
        ({"RANK": "9", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "16"}, 1, 0),
        ({"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16"}, 8, 1),
        ({"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16"}, 1, 0),  # --gpus-per-task=1
    ],
)
def test_each_process_has_a_gpu_of_its_own(env: dict[str, str], num_visible: int, expected: int) -> None:
    assert gpu_of(read_launch(env), num_visible, env) == expected


@pytest.mark.parametrize(
    ("env", "num_visible"),
    [
        ({"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}, 1),
        ({"SLURM_PROCID": "4", "SLURM_LOCALID": "4", "SLURM_NTASKS": "8"}, 4),
    ],
)
def test_more_processes_than_gpus_are_refused(env: dict[str, str], num_visible: int) -> None:
    with pytest.raises(LaunchError, match=f"local rank {env.get('LOCAL_RANK', '4')}, {num_visible} visible"):
        gpu_of(read_launch(env), num_visible, env)


def test_missing_master_address_is_named() -> None:
    with pytest.raises(LaunchError, match="no MASTER_ADDR"):
        _set_rendezvous({})
    env = {"MASTER_ADDR": "host", "SLURM_JOB_ID": "123456"}
    _set_rendezvous(env)
    assert env["MASTER_PORT"] == str(20000 + 123456 % 20000)


def test_master_address_is_derived_from_the_node_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[7-8]" ] && printf "node7\\nnode8\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    env = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NTASKS": "2"}
    _set_rendezvous(env)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("node7", "29500")


def test_a_rank_that_waits_in_vain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=rf"2 ranks didn't meet at 127.0.0.1:{port} within 0:00:01"):
        init_world("cpu", timeout_minutes=1 / 60)
