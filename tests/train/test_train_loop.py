"""Whole runs of a tiny model: they learn, continue to the bit, survive what goes wrong."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch

from clip_la import checkpoint
from clip_la.config import ConfigError, RunConfig
from clip_la.data.loader import Batch, TrainLoader
from clip_la.distributed import init_world
from clip_la.report.compare import compare
from clip_la.report.runs import read_runs
from clip_la.train import loop
from clip_la.train.evaluators import ScheduledEvaluator
from clip_la.train.folder import run_folder
from clip_la.train.loop import EXIT_FINISHED, EXIT_NON_FINITE, EXIT_STOPPED, train
from clip_la.train.run import Run

MakeConfig = Callable[..., RunConfig]
SAMPLES = 256


def folder_of(config: RunConfig) -> Path:
    return Path(config.logs) / str(config.name)


def records(config: RunConfig, kind: str) -> list[dict[str, Any]]:
    lines = (folder_of(config) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["type"] == kind]


def losses(config: RunConfig) -> dict[int, float]:
    return {record["samples"]: record["loss"] for record in records(config, "train")}


def final_state(config: RunConfig) -> dict[str, Any]:
    path = checkpoint.list_checkpoints(folder_of(config) / "checkpoints")[0]
    assert checkpoint.samples_of(path) == SAMPLES
    return checkpoint.read(path)


def signal_at_step(monkeypatch: pytest.MonkeyPatch, number: int, at: int) -> None:
    """Send this process a signal in the middle of step `at`, once."""
    original = loop.step

    def step(run: Run, *args: Any) -> Any:
        if run.progress.step == at:
            os.kill(os.getpid(), number)
        return original(run, *args)

    monkeypatch.setattr(loop, "step", step)


def assert_equal_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("state_dict", "optimizer", "progress", "clock"):
        assert_equal(found[name], expected[name], name)
    assert_equal(found["ranks"], expected["ranks"], "ranks")


def assert_equal(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_equal(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_equal(found[index], value, f"{where}[{index}]")
    else:
        assert found == expected, where


@pytest.mark.parametrize("kind", ["softmax", "eq4", "eq7", "centred"])
def test_a_run_learns_and_says_what_it_was(kind: str, make_config: MakeConfig) -> None:
    config = make_config(kind, epochs=12, lr=3e-3)
    assert train(config) == EXIT_FINISHED
    epochs = [record["loss"] for record in records(config, "epoch")]
    assert len(epochs) == 12
    assert epochs[-1] < epochs[0] - 0.3
    start = records(config, "run_start")[0]
    assert start["model"] == f"ViT-tiny-{kind}"
    assert start["attention"]["kind"] == ("eq7" if kind == "centred" else kind)
    assert records(config, "run_end")[-1]["reason"] == "finished"
    towers = start["tower_parameters"]
    assert 0 < towers["text"] + towers["image"] == start["num_parameters"] - 1
    assert records(config, "train")[-1]["peak_memory_bytes"] > 4 * start["num_parameters"]


def test_the_sigmoid_loss_trains_and_starts_where_openclip_starts_it(make_config: MakeConfig) -> None:
    config = make_config(siglip=True, epochs=8, lr=3e-3)
    assert train(config) == EXIT_FINISHED
    epochs = [record["loss"] for record in records(config, "epoch")]
    assert epochs[-1] < epochs[0]
    assert records(config, "train")[0]["logit_scale"] == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize(
    ("overrides", "at"),
    [
        ({}, 0),
        ({}, 6),
        ({}, 7),  # the last step of an epoch that isn't kept
        ({"workers": 2, "batch_size": 8, "accum_freq": 2}, 5),
        ({"precision": "amp_bf16", "dataset_resampled": True, "train_num_samples": 64}, 9),
        ({"force_patch_dropout": 0.5, "accum_freq": 2, "batch_size": 8}, 13),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_stopped_and_continued_equals_uninterrupted(
    overrides: dict[str, Any], at: int, number: int, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, stopped = make_config(**overrides, name="straight"), make_config(**overrides, name="stopped")
    assert train(straight) == EXIT_FINISHED
    with monkeypatch.context() as patch:
        signal_at_step(patch, number, at)
        assert train(stopped) == EXIT_STOPPED
    end = records(stopped, "run_end")[-1]
    assert end["reason"] == signal.Signals(number).name
    assert end["samples"] == 16 * (at + 1), "not within one step"
    newest = checkpoint.list_checkpoints(folder_of(stopped) / "checkpoints")[0]
    assert checkpoint.samples_of(newest) == end["samples"]
    assert train(stopped) == EXIT_FINISHED
    assert losses(stopped) == losses(straight)
    assert len(losses(straight)) == 16
    assert_equal_states(final_state(stopped), final_state(straight))


def test_a_signal_between_micro_steps_is_heard_in_the_same_step(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, original = make_config(batch_size=8, accum_freq=2), loop._to_device
    calls: list[None] = []

    def to_device(run: Run, batch: Batch) -> Any:
        calls.append(None)
        if len(calls) == 8:  # the second micro-batch of the fourth step
            os.kill(os.getpid(), signal.SIGTERM)
        return original(run, batch)

    monkeypatch.setattr(loop, "_to_device", to_device)
    assert train(config) == EXIT_STOPPED
    assert records(config, "run_end")[-1]["samples"] == 4 * 16


def test_a_signal_during_a_save_is_heard_and_the_file_is_whole(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, original = make_config(save_every_samples=16, keep_last=8), checkpoint.write_atomically
    paths: list[Path] = []

    def write(content: Any, path: Path) -> None:
        paths.append(path)
        if len(paths) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        original(content, path)

    monkeypatch.setattr(checkpoint, "write_atomically", write)
    assert train(config) == EXIT_STOPPED
    files = checkpoint.list_checkpoints(folder_of(config) / "checkpoints")
    assert records(config, "run_end")[-1]["samples"] == checkpoint.samples_of(files[0]) <= 4 * 16
    assert files == sorted(paths, reverse=True)
    assert all(checkpoint.read(path) for path in files)


class RecordingEvaluator:
    """Draws a random number, and does something else besides at one of its calls."""

    def __init__(self, name: str, at: int = 0, action: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self._at, self._action = at, action
        self.num_calls = 0

    def run(self, bundle: Any) -> dict[str, Any]:
        self.num_calls += 1
        if self.num_calls == self._at:
            self._action()
        return {"drawn": float(torch.rand(()))}


def evaluations(config: RunConfig) -> list[tuple[int, str]]:
    return [(record["samples"], record["name"]) for record in records(config, "eval")]


def test_a_signal_during_an_evaluation_leaves_the_others_to_the_next_start(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, stopped = make_config(name="straight"), make_config(name="stopped")
    assert train(straight) == EXIT_FINISHED
    first = RecordingEvaluator("first", 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    evaluators = [ScheduledEvaluator(each, 2) for each in (first, RecordingEvaluator("second"))]
    monkeypatch.setattr("clip_la.train.run.build_evaluators", lambda config, **_: evaluators)
    assert train(stopped) == EXIT_STOPPED
    assert evaluations(stopped) == [(128, "first")]
    assert records(stopped, "run_end")[-1]["samples"] == 128
    assert train(stopped) == EXIT_FINISHED
    assert evaluations(stopped)[1:] == [(128, "second"), (256, "first"), (256, "second")]
    assert losses(stopped) == losses(straight)
    assert_equal(final_state(stopped)["state_dict"], final_state(straight)["state_dict"], "weights")


def test_an_evaluation_lost_to_a_kill_is_made_up_for(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the last one, when nothing is left to train."""

    def kill() -> None:
        raise KeyboardInterrupt

    straight, killed = make_config(name="straight"), make_config(name="killed")
    assert train(straight) == EXIT_FINISHED
    second = RecordingEvaluator("second", 2, kill)
    evaluators = [ScheduledEvaluator(each, 2) for each in (RecordingEvaluator("first"), second)]
    monkeypatch.setattr("clip_la.train.run.build_evaluators", lambda config, **_: evaluators)
    with pytest.raises(KeyboardInterrupt):
        train(killed)
    assert evaluations(killed) == [(128, "first"), (128, "second"), (256, "first")]
    assert train(killed) == EXIT_FINISHED
    assert evaluations(killed)[3:] == [(256, "second")]
    assert [end["reason"] for end in records(killed, "run_end")] == ["finished"]
    assert losses(killed) == losses(straight)
    assert train(killed) == EXIT_FINISHED
    assert len(evaluations(killed)) == 4


def test_saves_by_samples_count_at_the_end_of_an_epoch_too(make_config: MakeConfig) -> None:
    config = make_config(save_every_samples=128, keep_last=8)
    train(config)
    found = [path.name for path in checkpoint.list_checkpoints(folder_of(config) / "checkpoints")]
    assert found == ["epoch_0004_00000000000256.pt", "rolling_00000000000128.pt"]


def test_saves_by_the_clock(make_config: MakeConfig) -> None:
    config = make_config(epochs=1, save_every_minutes=0.0, keep_last=8)
    train(config)
    found = checkpoint.list_checkpoints(folder_of(config) / "checkpoints")
    assert [checkpoint.samples_of(path) for path in found] == [64, 48, 32, 16]


def test_a_finished_run_does_nothing_when_run_again(make_config: MakeConfig) -> None:
    config = make_config()
    train(config)
    before = final_state(config)
    assert train(config) == EXIT_FINISHED
    assert_equal_states(final_state(config), before)
    assert len(records(config, "train")) == 16
    assert len(records(config, "run_start")) == len(records(config, "run_end")) == 1


def test_accumulation_equals_the_big_batch_for_every_parameter(make_config: MakeConfig) -> None:
    """Two micro-batches of 8 against one of 16: `logit_scale` included."""
    gradients = []
    for name, overrides in {"big": {}, "micro": {"batch_size": 8, "accum_freq": 2}}.items():
        config = make_config(**overrides, name=name, shuffle_block=64)
        with run_folder(config) as folder:
            run = loop.build_run(config, init_world("cpu"), folder)
            generator = torch.Generator().manual_seed(0)
            images = torch.randn(16, 3, 32, 32, generator=generator)
            texts = run.bundle.tokenizer([f"number {n} of many" for n in range(16)])
            micros = [
                loop.Micro(images[i : i + config.batch_size], texts[i : i + config.batch_size])
                for i in range(0, 16, config.batch_size)
            ]
            run.contrast.backward(run.model, micros, None)
            gradients.append({key: p.grad for key, p in run.model.named_parameters()})
    for key, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], expected, rtol=1e-4, atol=1e-6, msg=key)
    assert gradients[0]["logit_scale"].abs() > 1e-4


def nan_weights(config: RunConfig, path: Path) -> str:
    model = open_clip.create_model(f"local-dir:{path.parent}", load_weights=False)
    with torch.no_grad():
        model.visual.proj.fill_(float("nan"))
    torch.save({"state_dict": model.state_dict()}, path)
    return str(path)


def test_non_finite_steps_stop_the_run_and_nothing_is_saved(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    model_config = {"model_cfg": json.loads(Path(config.model).read_text()), "preprocess_cfg": {}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(model_config))
    config = replace(config, pretrained=nan_weights(config, tmp_path / "nan.pt"), max_bad_steps=3)
    assert train(config) == EXIT_NON_FINITE
    assert records(config, "train")[-1]["skipped_steps"] == 3
    assert records(config, "train")[-1]["loss"] is None
    assert records(config, "run_end")[-1]["reason"] == "non_finite"
    assert checkpoint.list_checkpoints(folder_of(config) / "checkpoints") == []


def test_a_single_bad_step_is_skipped_and_counted(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    original = loop._clip
    norms: list[float] = []

    def clip(run: Run) -> float:
        norms.append(original(run))
        return float("inf") if len(norms) == 5 else norms[-1]

    monkeypatch.setattr(loop, "_clip", clip)
    assert train(config) == EXIT_FINISHED
    assert records(config, "train")[-1]["skipped_steps"] == 1
    steps = {int(state["step"]) for state in final_state(config)["optimizer"]["state"].values()}
    assert steps == {15}


def test_numbers_that_stop_being_finite_leave_the_last_good_file(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(save_every_samples=16, keep_last=1, max_bad_steps=3)
    original = loop.step

    def step(run: Run, *args: Any) -> Any:
        if run.progress.step == 6:
            with torch.no_grad():
                run.bundle.model.get_parameter("visual.proj").fill_(float("nan"))
        return original(run, *args)

    monkeypatch.setattr(loop, "step", step)
    assert train(config) == EXIT_NON_FINITE
    (kept,) = checkpoint.list_checkpoints(folder_of(config) / "checkpoints")
    assert checkpoint.samples_of(kept) == 6 * 16
    assert all(torch.isfinite(weight).all() for weight in checkpoint.read(kept)["state_dict"].values())


class FakeClock:
    """Stands in for the `time` module of the meter; moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize(("seconds_of_data", "expected"), [(3.0, 0.75), (0.25, 0.2)])
def test_time_spent_waiting_for_data_is_logged_with_a_hint(
    seconds_of_data: float,
    expected: float,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="clip_la")
    clock, original_step, original_batches = FakeClock(), loop.step, TrainLoader.__iter__

    def step(*args: Any) -> Any:
        clock.now += 1.0
        return original_step(*args)

    def slow_batches(loader: TrainLoader) -> Iterator[Batch]:
        for batch in original_batches(loader):
            clock.now += seconds_of_data
            yield batch

    monkeypatch.setattr("clip_la.train.meter.time", clock)
    monkeypatch.setattr(loop, "step", step)
    monkeypatch.setattr(TrainLoader, "__iter__", slow_batches)
    config = make_config(epochs=2, log_every_n_steps=4)
    assert train(config) == EXIT_FINISHED
    assert [record["data_wait"] for record in records(config, "train")] == pytest.approx([expected] * 2)
    log = (folder_of(config) / "out.log").read_text()
    assert log.count(f"wait {100 * expected:.0f} %") == 2
    assert ("training waits for data; more --workers" in log) == (expected > 0.25)


class BrokenEvaluator:
    name = "broken"

    def __init__(self, config: RunConfig) -> None:
        self._folder = folder_of(config) / "checkpoints"
        self.newest_files: list[int | None] = []

    def run(self, bundle: Any) -> dict[str, Any]:
        self.newest_files.append(self._wait_for_file(64 * (len(self.newest_files) + 1)))
        torch.rand(100)  # an evaluation that draws random numbers must not move the training's
        raise RuntimeError("the tree is on fire")

    def _wait_for_file(self, samples: int) -> int | None:
        """Writing goes on in the background, evaluation or not."""
        for _ in range(600):
            found = checkpoint.list_checkpoints(self._folder)
            if found and checkpoint.samples_of(found[0]) == samples:
                return samples
            time.sleep(0.1)
        return None


def test_a_failing_evaluation_is_reported_after_the_save(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, broken = make_config(name="plain"), make_config(name="broken")
    assert train(plain) == EXIT_FINISHED
    evaluator = BrokenEvaluator(broken)
    monkeypatch.setattr(
        "clip_la.train.run.build_evaluators", lambda config, **_: [ScheduledEvaluator(evaluator)]
    )
    assert train(broken) == EXIT_FINISHED
    assert evaluator.newest_files == [64, 128, 192, 256]
    assert len(records(broken, "eval_failed")) == 4
    assert "the tree is on fire" in (folder_of(broken) / "out.log").read_text()
    assert_equal(final_state(broken)["state_dict"], final_state(plain)["state_dict"], "weights")


def test_openclip_reads_the_checkpoint(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config("eq7")
    train(config)
    path = checkpoint.list_checkpoints(folder_of(config) / "checkpoints")[0]
    (tmp_path / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": json.loads(Path(config.model).read_text()), "preprocess_cfg": {}})
    )
    model = open_clip.create_model(f"local-dir:{tmp_path}", load_weights=False)
    open_clip.load_checkpoint(model, str(path))
    bundle = checkpoint.load_bundle(folder_of(config))
    assert_equal(dict(bundle.model.state_dict()), dict(model.state_dict()), "weights")
    assert bundle.model_name == "ViT-tiny-eq7"
    assert bundle.preprocess_config["size"] == (32, 32)
    assert bundle.tokenizer("x").shape == (1, 16)


def test_two_processes_cannot_train_in_one_folder(make_config: MakeConfig) -> None:
    config = make_config()
    with run_folder(config), pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on"):
        train(config)


def test_any_two_runs_can_be_told_apart_by_their_configs(make_config: MakeConfig) -> None:
    folders = []
    for name, lr in {"slow": 1e-4, "fast": 1e-3}.items():
        config = make_config(name=name, lr=lr, epochs=1)
        train(config)
        folders.append(folder_of(config))
    differences = compare(read_runs(folders)).config
    assert differences.differs == {
        "lr": {"slow": 1e-4, "fast": 1e-3},
        "name": {"slow": "slow", "fast": "fast"},
    }
    recorded = {*differences.equal, *differences.differs}
    assert {field.name for field in fields(RunConfig)} <= recorded


def test_weights_of_another_attention_are_refused(make_config: MakeConfig) -> None:
    softmax = make_config("softmax", name="softmax")
    train(softmax)
    path = str(checkpoint.list_checkpoints(folder_of(softmax) / "checkpoints")[0])
    with pytest.raises(RuntimeError, match="attention softmax, the model uses eq7"):
        train(make_config("eq7", name="refused", pretrained=path))
    with pytest.raises(RuntimeError, match="attention softmax, the model uses eq7"):
        train(make_config("eq7", name="refused too", resume=path))
    assert train(make_config("eq7", name="allowed", pretrained_softmax=path)) == EXIT_FINISHED
