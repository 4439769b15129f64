"""Losses and weights against OpenCLIP's own trainer on the same batches: equal to the bit on CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import open_clip
import open_clip_train.main as stock
import pytest
import torch
from open_clip_train.data import DataInfo

from clip_la import checkpoint
from clip_la.config import RunConfig
from clip_la.data.loader import TrainLoader
from clip_la.train import loop

NUM_BATCHES, EPOCHS, BATCH = 4, 3, 16


class SameBatches:
    """What our run trained on, as OpenCLIP's loader hands it out."""

    num_batches = NUM_BATCHES
    num_samples = NUM_BATCHES * BATCH

    def __init__(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._batches = iter(batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(NUM_BATCHES):
            yield next(self._batches)


@pytest.mark.skipif(
    version("open_clip_torch") != "3.3.0", reason="parity is stated for open_clip_torch 3.3.0"
)
@pytest.mark.parametrize(
    "overrides",
    [{}, {"grad_clip_norm": 0.5, "lr_scheduler": "const", "warmup": 5}, {"wd": 0.0, "skip_scheduler": True}],
)
def test_every_step_equals_open_clip_train_main(
    overrides: dict[str, Any],
    make_config: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config("softmax", epochs=EPOCHS, save_frequency=1, **overrides)
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    original = TrainLoader.__iter__

    def recorded(loader: TrainLoader) -> Iterator[Any]:
        for batch in original(loader):
            batches.append((batch.images, batch.texts))
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(TrainLoader, "__iter__", recorded)
        assert loop.train(config) == loop.EXIT_FINISHED
    run_folder = Path(config.logs) / "run"
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    our_losses = [line["loss"] for line in lines if line["type"] == "train"]

    their_losses: list[float] = []
    their_loss = open_clip.ClipLoss.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        losses = their_loss(self, *args, **kwargs)
        their_losses.append(losses["contrastive_loss"].item())
        return losses

    open_clip.add_model_config(config.model)
    data = {"train": DataInfo(SameBatches(batches))}
    monkeypatch.setattr(stock, "get_data", lambda *_args, **_kwargs: data)
    monkeypatch.setattr(open_clip.ClipLoss, "forward", forward)
    stock.main(stock_flags(config, tmp_path))

    assert our_losses == their_losses
    assert len(our_losses) == NUM_BATCHES * EPOCHS
    for epoch in range(1, EPOCHS + 1):
        theirs = torch.load(
            tmp_path / "stock" / "run" / "checkpoints" / f"epoch_{epoch}.pt", weights_only=True
        )
        ours = checkpoint.read(next((run_folder / "checkpoints").glob(f"epoch_{epoch:04d}_*.pt")))
        assert ours["epoch"] == theirs["epoch"] == epoch
        for name, weight in theirs["state_dict"].items():
            assert torch.equal(ours["state_dict"][name], weight), name


def stock_flags(config: RunConfig, folder: Path) -> list[str]:
    flags = {
        "model": "ViT-tiny-softmax",
        "train-data": "unused",
        "logs": str(folder / "stock"),
        "name": "run",
        "batch-size": BATCH,
        "device": "cpu",
        "precision": "fp32",
        "workers": 0,
        **{
            key: getattr(config, key.replace("-", "_"))
            for key in ("epochs", "warmup", "lr", "wd", "lr-scheduler")
        },
    }
    if config.grad_clip_norm is not None:
        flags["grad-clip-norm"] = config.grad_clip_norm
    flat = [str(part) for key, value in flags.items() for part in (f"--{key}", value)]
    return flat + (["--skip-scheduler"] if config.skip_scheduler else [])
