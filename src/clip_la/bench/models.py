"""A training step of whole models beside each other, and the share of it that attention takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import open_clip
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from clip_la.bench.timing import Call
from clip_la.bundle import build, resolve_model_config

_ATTENTION = re.compile(r"clip_la::linear_attention(_backward)?$|aten::_scaled_dot_product_\w+$")
"""The outermost operations that compute attention, so that none is counted twice."""


@dataclass(frozen=True)
class Step:
    """What a training step works on: pixels a side, batch, autocast or not, image tower alone or both."""

    image_size: int
    batch_size: int
    precision: str  # "fp32", or "amp_bf16" for bfloat16 autocast
    tower: str = "both"  # or "image"


def build_model(name: str, step: Step, device: torch.device) -> nn.Module:
    """A model of that name for that image size, with random weights, in training mode."""
    config = resolve_model_config(name, force_image_size=step.image_size)
    model = build(config, model_name=name, device=device).model
    model.requires_grad_(True)
    return model.train()


def step_call(model: Any, step: Step, device: torch.device) -> Call:
    """Forward, contrastive loss (image tower: the sum of its features), backward, AdamW as in training."""
    shape = (step.batch_size, 3, step.image_size, step.image_size)
    images = torch.randn(shape, device=device)
    texts = torch.randint(1, 1000, (step.batch_size, model.context_length), device=device)
    parameters = model.visual.parameters() if step.tower == "image" else model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=step.precision == "amp_bf16")
    contrast = open_clip.ClipLoss()

    def call() -> None:
        """One training step."""
        with torch.autocast(device.type, torch.bfloat16, enabled=step.precision == "amp_bf16"):
            if step.tower == "image":
                loss = model.encode_image(images).float().square().sum()
            else:
                loss = contrast(**model(images, texts))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


def attention_share(call: Call, device: torch.device) -> float:
    """Which part of a step's time is spent in attention, forward and backward, by torch's profiler."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler, record_function("step"):
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    attention = total = 0.0
    for event in profiler.key_averages():
        microseconds = event.device_time_total if device.type == "cuda" else event.cpu_time_total
        if event.key == "step":
            total = event.cpu_time_total
        elif _ATTENTION.match(event.key):
            attention += microseconds
    return attention / total
