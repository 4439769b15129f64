"""Checkpoints: whole or not at all, the newest readable wins, nothing good is lost."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from clip_la import checkpoint
from clip_la.checkpoint import (
    CheckpointError,
    CheckpointStore,
    list_checkpoints,
    newest_readable,
    write_atomically,
)


def content(value: float = 1.0) -> dict[str, Any]:
    return {
        "format": checkpoint.FORMAT,
        "model_config": {},
        "state_dict": {"weight": torch.full((1000,), value)},
    }


def saved(folder: Path, *samples: int) -> CheckpointStore:
    store = CheckpointStore(folder, keep_last=2)
    for number in samples:
        store.save(content(float(number)), samples=number)
    store.wait()
    return store


def test_rolling_files_are_pruned_and_epochs_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for samples in (10, 20, 30, 40):
        store.save(content(), samples=samples, epoch=1 if samples == 20 else None)
    store.wait()
    assert [checkpoint.samples_of(path) for path in list_checkpoints(tmp_path)] == [40, 30, 20]


def test_the_snapshot_is_taken_before_training_goes_on(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    live = content(1.0)
    store.save(live, samples=10)
    live["state_dict"]["weight"].fill_(2.0)
    store.wait()
    assert torch.equal(
        checkpoint.read(list_checkpoints(tmp_path)[0])["state_dict"]["weight"], torch.ones(1000)
    )


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "flip"])
def test_a_damaged_newest_file_is_skipped_with_a_warning(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 10, 20)
    newest = list_checkpoints(tmp_path)[0]
    whole = newest.read_bytes()
    middle = whole.index(torch.full((1000,), 20.0).numpy().tobytes()) + 2000
    damaged = {
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "text": b"<html>404</html>",
        "flip": whole[:middle] + bytes([whole[middle] ^ 0x40]) + whole[middle + 1 :],
    }
    newest.write_bytes(damaged[damage])
    with caplog.at_level(logging.WARNING, logger="clip_la"):
        found = newest_readable(tmp_path)
    assert found is not None
    assert checkpoint.samples_of(found[0]) == 10
    assert newest.name in caplog.text


def test_foreign_files_and_sibling_folders_do_not_count(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoints", 10)
    saved(tmp_path / "checkpoints_old", 99)
    (tmp_path / "checkpoints" / "epoch_latest.pt").write_bytes(b"not ours")
    found = newest_readable(tmp_path / "checkpoints")
    assert found is not None
    assert checkpoint.samples_of(found[0]) == 10


def test_non_finite_weights_are_not_saved(tmp_path: Path) -> None:
    store = saved(tmp_path, 10)
    store.save(content(float("nan")), samples=20)
    with pytest.raises(CheckpointError, match=r"not finite \(weight\)"):
        store.wait()
    assert [checkpoint.samples_of(path) for path in list_checkpoints(tmp_path)] == [10]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = saved(tmp_path, 10, 20)

    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_full)
    store.save(content(), samples=30)
    with pytest.raises(CheckpointError, match="No space left on device"):
        store.wait()
    assert [checkpoint.samples_of(path) for path in list_checkpoints(tmp_path)] == [20, 10]
    assert list(tmp_path.glob("*.tmp")) == []


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    (tmp_path / "rolling_00000000000010.pt.tmp").write_bytes(b"half")
    CheckpointStore(tmp_path, keep_last=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"state_dict": {}}, "is not a clip_la checkpoint"),
        ({"state_dict": {}, "model_config": {}, "format": 99}, "has format 99; this version reads 1"),
    ],
)
def test_other_files_are_refused_by_name(payload: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_atomically(payload, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        checkpoint.read(tmp_path / "missing.pt")


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path / "ran").touch, ())

    torch.save(Payload(), tmp_path / "evil.pt")
    with pytest.raises(CheckpointError):
        checkpoint.read(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()
