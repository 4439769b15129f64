"""Learning rate and optimizer against OpenCLIP's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import open_clip
import pytest
import torch
from open_clip_train.scheduler import const_lr, const_lr_cooldown, cosine_lr

import clip_la  # noqa: F401 (registers the models)
from clip_la.config import RunConfig
from clip_la.train.optim import Clock, build_optimizer, lr_at

STEPS, WARMUP, BATCH, EPOCHS = 60, 7, 32, 6


@pytest.mark.parametrize("scheduler", ["cosine", "const", "const-cooldown"])
def test_learning_rate_equals_openclips_at_every_step(scheduler: str) -> None:
    options: dict[str, Any] = {"lr_scheduler": scheduler, "lr": 3e-4, "epochs": EPOCHS}
    optimizer = SimpleNamespace(param_groups=[{}])
    if scheduler == "cosine":
        theirs = cosine_lr(optimizer, 3e-4, WARMUP, STEPS)
    elif scheduler == "const":
        theirs = const_lr(optimizer, 3e-4, WARMUP, STEPS)
    else:
        options.update(epochs_cooldown=2, lr_cooldown_power=2.0, lr_cooldown_end=1e-5)
        theirs = const_lr_cooldown(optimizer, 3e-4, WARMUP, STEPS, 2 * STEPS // EPOCHS, 2.0, 1e-5)
    clock = Clock(STEPS * BATCH, WARMUP * BATCH, STEPS * BATCH // EPOCHS)
    for step in range(STEPS):
        assert lr_at(step * BATCH, RunConfig(**options), clock, BATCH) == pytest.approx(
            theirs(step), rel=1e-12
        )


def test_learning_rate_is_a_function_of_samples_not_of_the_batch() -> None:
    clock = Clock(3200, 0, 320)
    assert lr_at(1600, RunConfig(), clock, 32) == lr_at(1600, RunConfig(), clock, 64)


def test_weight_decay_spares_what_openclip_spares_and_gains() -> None:
    model = open_clip.create_model("ViT-nano-8-LA-gain")
    without, with_decay = build_optimizer(model, RunConfig()).param_groups
    assert (without["weight_decay"], with_decay["weight_decay"]) == (0.0, 0.2)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {names[id(parameter)] for parameter in with_decay["params"]}
    assert all(model.get_parameter(name).ndim >= 2 and "ln" not in name for name in decayed)
    assert sum(name.endswith(".gain") for name in names.values()) == 10
    assert len(decayed) + len(without["params"]) == len(names)


def test_timm_optimizers_work() -> None:
    model = open_clip.create_model("ViT-nano-8-LA")
    optimizer = build_optimizer(model, RunConfig(opt="timm/lion", lr=1e-4))
    assert optimizer.param_groups[0]["lr"] == 1e-4
    with pytest.raises(ValueError, match="expected adamw or timm/NAME"):
        build_optimizer(model, RunConfig(opt="sgd"))


@pytest.mark.parametrize(("precision", "fused"), [("amp_bf16", True), ("fp32", False), ("amp", False)])
def test_one_pass_over_the_parameters_gives_the_plain_steps(precision: str, fused: bool) -> None:
    torch.manual_seed(0)
    models = [torch.nn.Linear(5, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours = build_optimizer(models[0], RunConfig(precision=precision, lr=1e-2, wd=0.1))
    plain = build_optimizer(models[1], RunConfig(precision="fp32", lr=1e-2, wd=0.1))
    for _ in range(3):
        gradient = torch.randn(3, 5)
        for model, optimizer in zip(models, (ours, plain), strict=True):
            model.weight.grad, model.bias.grad = gradient.clone(), gradient[:, 0].clone()
            optimizer.step()
    assert {bool(group["fused"]) for group in ours.param_groups} == {fused}
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), rtol=1e-5, atol=1e-7)
