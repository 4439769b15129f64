"""metrics.jsonl and the sinks beside it, with the real packages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clip_la.config import RunConfig
from clip_la.metrics import MetricsLog, build_sinks, scalars


def test_records_are_json_lines_without_nan(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write("train", 128, loss=float("nan"), lr=1e-3, nested={"a": [float("inf"), 1.0]})
    log.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (record["type"], record["samples"], record["loss"], record["lr"]) == ("train", 128, None, 1e-3)
    assert record["nested"] == {"a": [None, 1.0]}


def test_a_torn_line_stays_apart_from_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"type": "train", "sam')
    MetricsLog(path).write("run_start", 0)
    assert json.loads(path.read_text().splitlines()[1])["type"] == "run_start"


def test_scalars_have_the_names_that_dashboards_show() -> None:
    assert scalars("train", {"loss": 1.0, "text": "x", "flag": True}) == {"train/loss": 1.0}
    evaluation = {"name": "zeroshot/birds", "metrics": {"top1": 0.5, "templates": "plain"}}
    assert scalars("eval", evaluation) == {"zeroshot/birds/top1": 0.5}


def test_tensorboard_gets_every_number_at_its_sample(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path / "metrics.jsonl", build_sinks(RunConfig(report_to="tensorboard"), tmp_path))
    log.write("train", 128, loss=2.0)
    log.write("train", 256, loss=1.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(128, 2.0), (256, 1.0)]


@pytest.mark.slow
def test_wandb_goes_on_under_the_same_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = RunConfig(report_to="wandb", name="run")
    ids = []
    for samples in (128, 256):
        log = MetricsLog(tmp_path / "metrics.jsonl", build_sinks(config, tmp_path))
        log.write("train", samples, loss=1.0)
        assert wandb.run is not None
        ids.append(wandb.run.id)
        assert wandb.run.summary["train/loss"] == 1.0
        wandb.finish()
    assert ids[0] == ids[1] == (tmp_path / "wandb_id").read_text()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{ids[0]}"))) == 2
