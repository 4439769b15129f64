"""Estimates against what can be counted, and against published figures."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from clip_la.bundle import build, resolve_model_config
from clip_la.checkpoint import write_atomically
from clip_la.cluster.plan import checkpoint_bytes, make_plan
from clip_la.cluster.submit import recipe_warnings
from clip_la.config import RunConfig
from clip_la.model_size import (
    Tower,
    count_parameters,
    count_tower_parameters,
    forward_flops,
    model_shape,
    training_flops,
)
from clip_la.openclip import tower_of
from clip_la.train.optim import build_optimizer

FULL = RunConfig(model="ViT-B-16-LA", batch_size=1024, train_num_samples=400_000_000, warmup=2000)


@pytest.mark.parametrize("name", ["ViT-nano-8", "ViT-nano-8-LA-gain", "ViT-S-16-LA-eq4"])
def test_parameters_are_counted_exactly(name: str) -> None:
    config = resolve_model_config(name)
    model = build(config, model_name=name).model
    assert count_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    for tower, num_parameters in count_tower_parameters(config).items():
        counted = sum(p.numel() for name, p in model.named_parameters() if tower_of(name) == tower)
        assert num_parameters == counted


@pytest.mark.parametrize(("name", "gflops"), [("ViT-B-16", 41.09), ("ViT-L-14", 175.33)])
def test_forward_flops_are_those_that_openclip_publishes(name: str, gflops: float) -> None:
    """docs/model_profile.csv of OpenCLIP, to its two decimals."""
    assert forward_flops(model_shape(resolve_model_config(name))) / 1e9 == pytest.approx(gflops, abs=0.005)


def kept_bytes(model: torch.nn.Module, batch: int) -> int:
    """What autograd keeps of a forward pass in amp_bf16, without the parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    images, texts = torch.zeros(batch, 3, 224, 224), torch.ones(batch, 77, dtype=torch.long)
    with saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        model(images, texts)
    return sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in parameters)


@pytest.mark.parametrize("name", ["ViT-S-16", "ViT-S-16-LA"])
def test_activations_are_those_that_autograd_keeps(name: str) -> None:
    config = resolve_model_config(name)
    model, shape = build(config, model_name=name).model.train(), model_shape(config)
    estimate = shape.image.activation_bytes + shape.text.activation_bytes
    assert kept_bytes(model, 2) - kept_bytes(model, 1) == pytest.approx(estimate, rel=0.05)


def test_published_gpu_hours_give_the_default_utilisation() -> None:
    """OpenCLIP's docs/PRETRAINED.md: 12.8 billion samples in so many hours of one A100, 312 TFLOP/s."""
    for name, batch, recompute, hours in (
        ("ViT-B-16", 33792, False, 10700),
        ("ViT-L-14", 38400, True, 50800),
    ):
        flops = 12.8e9 * training_flops(model_shape(resolve_model_config(name)), batch, recompute)
        assert 0.13 <= flops / (hours * 3600 * 312e12) <= 0.16


def test_linear_attention_saves_what_grows_with_the_square() -> None:
    softmax = Tower(768, 12, 4.0, 64, 197, linear=False, causal=False)
    linear = dataclasses.replace(softmax, linear=True)
    assert softmax.forward_flops - linear.forward_flops == 4 * 197 * 768 * 12 * (197 - 64)
    short = Tower(512, 12, 4.0, 64, 77, linear=True, causal=True)
    assert short.forward_flops == dataclasses.replace(short, linear=False).forward_flops


def test_plan_of_the_full_run() -> None:
    plan = make_plan(FULL, 32, 400_000_000)
    assert plan.global_batch == 32_768
    assert plan.num_steps == 32 * 12_208
    assert plan.num_samples == plan.num_steps * 32_768
    # By hand: 20 bytes a parameter, 34 N w L for both towers x 1,024, two logit blocks of 1,024 x 32,768.
    towers = 34 * (197 * 768 * 12 + 77 * 512 * 12) * 1024
    by_hand = 20 * plan.num_parameters + towers + 2 * 12 * 1024 * 32_768 + 3 * 2**30
    assert plan.gpu_bytes == by_hand
    assert (
        make_plan(dataclasses.replace(FULL, grad_checkpointing=True), 32, 400_000_000).gpu_bytes < by_hand / 2
    )
    assert plan.hours(32, 0.3) == pytest.approx(plan.hours(32, 0.15) / 2)


def test_checkpoint_size_is_that_of_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = resolve_model_config("ViT-nano-8-LA")
    model = build(config, model_name="nano").model
    optimizer = build_optimizer(model, RunConfig())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    write_atomically(
        {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt"
    )
    size = (tmp_path / "x.pt").stat().st_size
    assert size == pytest.approx(checkpoint_bytes(count_parameters(config)), rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"lr": 5e-3}, "--lr is 0.005; OpenCLIP's 0.0005 at batch 32,768"),
        ({"lr": 1e-5}, "--lr is 1e-05"),
        ({"epochs": 1, "train_num_samples": 10_000_000}, "never reaches its peak"),
        ({"warmup": 50_000}, "the warm-up takes 13% of the run"),
        ({"warmup": 0}, "--warmup is 0"),
        ({"model": "ViT-L-16-LA"}, "won't fit an H200's 131; use --grad-checkpointing"),
    ],
)
def test_warnings_are_of_what_does_not_fit(changes: dict[str, object], message: str | None) -> None:
    config = dataclasses.replace(FULL, **changes)
    found = recipe_warnings(config, make_plan(config, 32, config.train_num_samples or 0))
    if message is None:
        assert found == []
    else:
        assert len(found) == 1
        assert message in found[0]
