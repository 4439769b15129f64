"""Diagnostics: they come when they are due, say what is so, and change nothing of the run."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train_loop import assert_equal_states, final_state, losses, records, signal_at_step
from test_train_ranks import config_file, launch, wait

from clip_la.bundle import build, resolve_model_config
from clip_la.config import RunConfig
from clip_la.distributed import init_world
from clip_la.metrics import scalars
from clip_la.report.runs import read_run
from clip_la.report.write import write_report
from clip_la.train import diagnostics
from clip_la.train.diagnostics import Diagnostics, tower_grad_norms
from clip_la.train.loop import EXIT_FINISHED, EXIT_STOPPED, train
from clip_la.train.run import build_run

MakeConfig = Callable[..., RunConfig]
FIGURES = {"output_norm", "output_to_residual", "query_to_constant", "entropy", "effective_rank"}


def folder_of(config: RunConfig) -> Path:
    return Path(config.logs) / str(config.name)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("softmax", {"grad_clip_norm": 0.5, "force_patch_dropout": 0.5}),
        ("eq4", {"force_custom_text": True}),
        ("centred", {"precision": "amp_bf16", "grad_checkpointing": True}),
    ],
)
def test_a_run_with_diagnostics_equals_one_without_to_the_bit(
    kind: str, overrides: dict[str, Any], make_config: MakeConfig
) -> None:
    plain = make_config(kind, name="plain", **overrides)
    watched = make_config(kind, name="watched", diagnostics=True, **overrides)
    assert train(plain) == train(watched) == EXIT_FINISHED
    assert losses(watched) == losses(plain)
    assert_equal_states(final_state(watched), final_state(plain))

    measured = records(watched, "diagnostics")
    assert [record["samples"] for record in measured] == [0, 64, 128, 192, 256]
    layers = {"image/0", "image/1", "text/0"}
    no_constant_part = {f"image/{layer}/query_to_constant" for layer in (0, 1) if kind == "centred"}
    for record in measured:
        assert record["layers"].keys() == {f"{layer}/{name}" for layer in layers for name in FIGURES}
        assert {name for name, value in record["layers"].items() if value is None} == no_constant_part
        assert all(math.isfinite(value) for value in record["layers"].values() if value is not None)
    assert measured[0]["layers"] != measured[-1]["layers"]
    assert not records(plain, "diagnostics")


@pytest.mark.parametrize("custom_text", [False, True])
def test_every_gradient_but_the_logit_scale_belongs_to_a_tower(custom_text: bool) -> None:
    config = resolve_model_config("ViT-nano-8-LA-gain", force_custom_text=custom_text)
    model = build(config, model_name="nano").model
    assert tower_grad_norms(model) == {"grad_norm_image": 0.0, "grad_norm_text": 0.0}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    num_image = sum(parameter.numel() for parameter in model.get_submodule("visual").parameters())
    num_all = sum(parameter.numel() for parameter in model.parameters())
    found = tower_grad_norms(model)
    assert found["grad_norm_image"] == pytest.approx(math.sqrt(num_image), rel=1e-4)
    assert found["grad_norm_text"] == pytest.approx(math.sqrt(num_all - num_image - 1), rel=1e-4)


def test_gradient_norms_by_tower_are_logged_as_they_were_before_clipping(make_config: MakeConfig) -> None:
    config = make_config(diagnostics=True, grad_clip_norm=1e-3, epochs=1)
    assert train(config) == EXIT_FINISHED
    for record in records(config, "train"):
        assert record["grad_norm"] > 0.01
        towers = math.hypot(record["grad_norm_image"], record["grad_norm_text"])
        assert 0.5 * record["grad_norm"] < towers <= record["grad_norm"] * 1.0001
    locked = make_config(name="locked", diagnostics=True, lock_image=True, epochs=1)
    assert train(locked) == EXIT_FINISHED
    assert {record["grad_norm_image"] for record in records(locked, "train")} == {0.0}


def test_a_stopped_run_continues_with_the_same_diagnostics(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = make_config(name="straight", diagnostics=True, diagnostics_frequency=2)
    stopped = make_config(name="stopped", diagnostics=True, diagnostics_frequency=2)
    assert train(straight) == EXIT_FINISHED
    with monkeypatch.context() as patch:
        signal_at_step(patch, signal.SIGTERM, 7)  # the last step of the second epoch
        assert train(stopped) == EXIT_STOPPED
    assert train(stopped) == EXIT_FINISHED
    assert_equal_states(final_state(stopped), final_state(straight))
    points = [read_run(folder_of(config)).diagnostics for config in (straight, stopped)]
    assert [point.samples for point in points[0]] == [0, 128, 256]
    assert points[0] == points[1]


def test_what_is_measured_is_the_block_as_it_runs(make_config: MakeConfig) -> None:
    """Norms against a forward pass by hand; no hook, mode or gradient is left behind."""
    config = make_config("eq7", diagnostics=True)
    folder = folder_of(config)
    folder.mkdir(parents=True)
    run = build_run(config, init_world("cpu"), folder)
    assert run.diagnostics is not None
    model: Any = run.bundle.model.train()
    found = run.diagnostics.measure()
    assert found == run.diagnostics.measure()
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    block = model.visual.transformer.resblocks[0]
    inputs: list[torch.Tensor] = []
    handle = block.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model.eval()
    ratios, norms = [], []
    with torch.no_grad():
        for image in run.diagnostics._images:
            model.encode_image(image[None])
            x = inputs.pop()
            out = block.attention(block.ln_1(x))
            ratios.append((out.norm() / x.norm()).item())
            norms.append(out.norm(dim=-1).mean().item())
    handle.remove()
    assert found["image/0/output_to_residual"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-5)
    assert found["image/0/output_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-5)


def test_a_failure_is_reported_and_training_goes_on(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> dict[str, float]:
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(diagnostics, "measure_weights", fail)
    config = make_config(diagnostics=True, epochs=1)
    with caplog.at_level(logging.ERROR):
        assert train(config) == EXIT_FINISHED
    assert "the diagnostics failed; training goes on" in caplog.text
    assert not records(config, "diagnostics")
    assert len(records(config, "train")) == 4


def test_data_without_a_usable_pair(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("filepath\ttitle\nnowhere.png\tnothing\n")
    config = make_config(train_data=str(tmp_path / "empty.csv"))
    bundle = build(resolve_model_config(config.model), model_name="tiny")
    with pytest.raises(ValueError, match=r"--diagnostics found no usable pair in .*empty.csv"):
        Diagnostics(config, bundle)


@pytest.mark.slow
def test_only_the_main_of_two_ranks_measures_and_nothing_else_changes(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    plain = make_config(name="plain", batch_size=8, epochs=2)
    watched = make_config(name="watched", batch_size=8, epochs=2, diagnostics=True)
    for config in (plain, watched):
        command = ["-m", "clip_la.cli", "train", "--config", config_file(config, tmp_path)]
        assert wait(launch(command, 2)) == [0, 0]
    assert losses(watched) == losses(plain)
    assert [record["samples"] for record in records(watched, "diagnostics")] == [0, 64, 128]


def test_dashboards_and_the_report_show_them(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(diagnostics=True, epochs=1)
    assert train(config) == EXIT_FINISHED
    record = records(config, "diagnostics")[-1]
    shown = scalars("diagnostics", {"layers": record["layers"]})
    assert shown["diagnostics/image/1/entropy"] == record["layers"]["image/1/entropy"]
    write_report([folder_of(config)], tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Attention layer by layer, on the same few training pairs" in page
