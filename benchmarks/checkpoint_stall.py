"""How long a save keeps training waiting: the background write against writing in place.

    python benchmarks/checkpoint_stall.py [MODEL]

Prints seconds, for a model with AdamW state: copying to host memory (what training waits for), the whole
background write, and a plain torch.save to the same disk.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import open_clip
import torch

import clip_la  # noqa: F401 (registers the models)
from clip_la.checkpoint import FORMAT, CheckpointStore, _to_host


def main(model_name: str = "ViT-B-16-LA") -> None:
    """Measure and print."""
    model = open_clip.create_model(model_name)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    content = {
        "format": FORMAT,
        "model_config": {},
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    num_bytes = 4 * 3 * sum(parameter.numel() for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(3):
            began = time.perf_counter()
            _to_host(content)
            copy = time.perf_counter() - began
            store = CheckpointStore(Path(folder) / str(repeat), keep_last=1)
            began = time.perf_counter()
            store.save(content, samples=1)
            stall = time.perf_counter() - began
            store.wait()
            whole = time.perf_counter() - began
            began = time.perf_counter()
            torch.save(content, Path(folder) / "plain.pt")
            plain = time.perf_counter() - began
            print(
                f"{model_name}, {num_bytes / 2**30:.2f} GiB: copy {copy:.2f} s, "
                f"training waits {stall:.2f} s, all of it {whole:.2f} s; plain torch.save {plain:.2f} s"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
