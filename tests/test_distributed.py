"""What the environment of a launcher means."""

from __future__ import annotations

import pytest

from clip_la.distributed import Launch, LaunchError, _set_rendezvous, read_launch


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Launch(0, 0, 1)),
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, Launch(5, 1, 8)),
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}, Launch(3, 1, 4)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "8"}, Launch(1, 0, 2)),
        ({"SLURM_PROCID": "0"}, Launch(0, 0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, Launch(0, 0, 1)),
    ],
)
def test_launch_is_read_from_the_environment(env: dict[str, str], expected: Launch) -> None:
    assert read_launch(env) == expected


def test_a_slurm_task_that_cannot_know_its_world_is_refused() -> None:
    with pytest.raises(LaunchError, match="SLURM_PROCID is 3 but neither"):
        read_launch({"SLURM_PROCID": "3"})
    with pytest.raises(LaunchError, match="SLURM_PROCID is 3, but there are 2 task"):
        read_launch({"SLURM_PROCID": "3", "SLURM_NTASKS": "2"})


def test_missing_master_address_is_named() -> None:
    with pytest.raises(LaunchError, match="no MASTER_ADDR"):
        _set_rendezvous({})
    env = {"MASTER_ADDR": "host", "SLURM_JOB_ID": "123456"}
    _set_rendezvous(env)
    assert env["MASTER_PORT"] == str(20000 + 123456 % 20000)
