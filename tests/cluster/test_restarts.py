"""What becomes of a job, from its tasks' exit codes and its history."""

from __future__ import annotations

from pathlib import Path

import pytest

from clip_la.cluster.restarts import judge, main, read_exits, record_start, stalled_starts


def save(run: Path, samples: int) -> None:
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints" / f"rolling_{samples:014d}.pt").touch()


@pytest.mark.parametrize(
    ("exits", "signal", "code", "reason"),
    [
        ([0, 0], "", 0, "finished"),
        ([0], "", 75, "crashed: of the tasks ended 1 with 0, 1 without a code"),
        ([75, 75], "USR1", 75, "stopped by USR1 and saved"),
        ([75, 75], "", 75, "stopped by a signal and saved"),
        ([138, 138], "USR1", 75, "stopped by USR1; continuing from 0"),
        ([1, 137], "", 75, "1 with 1, 1 with 137"),
        ([], "", 75, "2 without a code"),
        ([2], "", 2, "the config can't be used"),
        ([2, 137], "USR1", 2, "the config can't be used"),
        ([3, 3], "", 3, "not finite"),
    ],
)
def test_verdict(tmp_path: Path, exits: list[int], signal: str, code: int, reason: str) -> None:
    verdict = judge(tmp_path, "5", exits, 2, signal)
    assert verdict.exit_code == code
    assert reason in verdict.reason


def test_only_starts_since_the_newest_checkpoint_count(tmp_path: Path) -> None:
    for restart in range(3):
        record_start(tmp_path, "5", restart)
    assert stalled_starts(tmp_path, "5") == 3
    record_start(tmp_path, "6", 0)  # another job of the same name doesn't use up this one's starts
    save(tmp_path, 100)
    assert stalled_starts(tmp_path, "5") == 0
    record_start(tmp_path, "5", 3)
    assert stalled_starts(tmp_path, "5") == 1


def test_gives_up_after_three_restarts_without_progress(tmp_path: Path) -> None:
    save(tmp_path, 100)
    for restart in range(4):
        assert judge(tmp_path, "5", [1], 1, "").exit_code == 75
        record_start(tmp_path, "5", restart)
    verdict = judge(tmp_path, "5", [1], 1, "")
    assert verdict.exit_code == 1
    assert "no checkpoint newer than 100 samples" in verdict.reason


def test_the_batch_script_reads_the_code_from_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exits = tmp_path / "exits"
    exits.mkdir()
    (exits / "0").write_text("0\n")
    (exits / "1").write_text("")  # killed while writing
    assert read_exits(exits, 3) == [0]
    assert main([str(tmp_path), "--job", "5", "--exits", str(exits), "--num-tasks", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "75\n"
    assert "crashed" in captured.err
