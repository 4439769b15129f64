"""Several processes give what one gives, to the last count; an error of one reaches all."""

from __future__ import annotations

import json
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from toy_clip import ToyClip, toy_bundle
from toy_tree import make_tree

from clip_la.evaluate.zeroshot import ZeroShot

COUNTS = {"zebra": 9, "kite": 4, "hat": 7, "green apple": 5, "crane": 1, "bottle": 3, "old car": 8}


class BrokenOnRank1(ToyClip):
    def encode_image(self, images: Tensor) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == 1:
            raise MemoryError("no room on this rank")
        return super().encode_image(images)


def evaluate(tree: Path, model: ToyClip) -> dict[str, Any]:
    folder = ZeroShot(tree, tree / "classnames.txt", "simple-7", batch_size=5, workers=0)
    result = folder.evaluate(toy_bundle(model))
    tally = result.tally
    return {
        "metrics": result.metrics(),
        "counts": torch.stack((tally.num_images, tally.num_top1, tally.num_top5)).tolist(),
        "confusions": sorted((*pair, count) for pair, count in tally.confusions.items()),
        "unreadable": tally.unreadable,
    }


def run_rank(rank: int, world_size: int, port: int, tree: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    whole = evaluate(tree, ToyClip())
    try:
        evaluate(tree, BrokenOnRank1())
    except RuntimeError as error:
        whole["error"] = str(error)
    (tree.parent / f"rank{rank}.json").write_text(json.dumps(whole))
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("world_size", [2, 3])
def test_counts_do_not_depend_on_the_number_of_processes(tmp_path: Path, world_size: int) -> None:
    tree = make_tree(tmp_path / "tree", COUNTS)
    (tree / "hat" / "broken.png").write_bytes(b"no picture")
    alone = evaluate(tree, ToyClip())

    # Forked, because each process would else spend seconds on its imports.
    mp.start_processes(run_rank, (world_size, free_port(), tree), nprocs=world_size, start_method="fork")

    for rank in range(world_size):
        together = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert together.pop("error") == "rank 1: MemoryError: no room on this rank"
        assert together == json.loads(json.dumps(alone))
    assert alone["metrics"]["num_images"] == sum(COUNTS.values())
    assert len(alone["unreadable"]) == 1
    assert Counter(COUNTS.values()) == Counter(alone["counts"][0])
