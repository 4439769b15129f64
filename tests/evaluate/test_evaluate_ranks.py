"""Several processes give what one gives, to the last count; an error of one reaches all."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from toy_clip import ToyClip, toy_bundle
from toy_shards import shards_of_tree
from toy_tree import make_tree

from clip_la.evaluate import ranks
from clip_la.evaluate.cache import EvaluationCache
from clip_la.evaluate.ranks import RanksError
from clip_la.evaluate.zeroshot import ZeroShot

COUNTS = {"zebra": 9, "kite": 4, "hat": 7, "green apple": 5, "crane": 1, "bottle": 3, "old car": 8}


class BrokenOnRank1(ToyClip):
    def encode_image(self, images: Tensor) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == 1:
            raise MemoryError("no room on this rank")
        return super().encode_image(images)


class BrokenTextOnRank1(ToyClip):
    def encode_text(self, tokens: Tensor) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == 1:
            raise ValueError("no words on this rank")
        return super().encode_text(tokens)


class StopsAfter1(ToyClip):
    num_batches = 0

    def encode_image(self, images: Tensor) -> Tensor:
        self.num_batches += 1
        if self.num_batches > 1:
            raise ValueError("stopped")
        return super().encode_image(images)


def evaluate(data: str | Path, model: ToyClip, cache: EvaluationCache | None = None) -> dict[str, Any]:
    evaluator = ZeroShot(data, None, "openai-80", batch_size=5, workers=0, cache=cache)
    result = evaluator.evaluate(toy_bundle(model))
    tally = result.tally
    return {
        "metrics": result.metrics(),
        "counts": torch.stack((tally.num_images, tally.num_top1, tally.num_top5)).tolist(),
        "confusions": sorted((*pair, count) for pair, count in tally.confusions.items()),
        "unreadable": tally.unreadable,
    }


def error_of(work: Callable[[], object]) -> str:
    with pytest.raises(RanksError) as caught:
        work()
    return str(caught.value)


def run_rank(rank: int, world_size: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    tree, shards, cache = folder / "tree", f"{folder}/shards/*.tar", EvaluationCache(folder / "cache")
    found = {
        "tree": evaluate(tree, ToyClip()),
        "shards": evaluate(shards, ToyClip()),
        "stopped": error_of(lambda: evaluate(tree, StopsAfter1(), cache)),
        "num_finished": len(list((folder / "cache" / "partial").glob("*/rank-*.jsonl"))),
        "image error": error_of(lambda: evaluate(tree, BrokenOnRank1())),
        "text error": error_of(lambda: evaluate(tree, BrokenTextOnRank1())),
        "no names": error_of(lambda: ZeroShot(tree, "absent.txt")),
        "no shards": error_of(lambda: evaluate(f"{folder}/shards/{{00000,00009}}.tar", ToyClip())),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def continue_rank(rank: int, world_size: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    found = evaluate(folder / "tree", ToyClip(), EvaluationCache(folder / "cache"))
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def start(work: Callable[..., None], world_size: int, folder: Path) -> list[dict[str, Any]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    # Forked, because each process would else spend seconds on its imports.
    mp.start_processes(work, (world_size, port, folder), nprocs=world_size, start_method="fork")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_counts_do_not_depend_on_the_number_of_processes(tmp_path: Path, world_size: int) -> None:
    tree = make_tree(tmp_path / "tree", COUNTS)
    (tmp_path / "classnames.txt").write_text((tree / "classnames.txt").read_text())
    (tree / "hat" / "broken.png").write_bytes(b"no picture")
    shards = shards_of_tree(tree, tmp_path / "shards", str, sizes=(1, 20, 2, 10**6))
    alone = {"tree": evaluate(tree, ToyClip()), "shards": evaluate(shards, ToyClip())}
    assert alone["tree"]["counts"] == alone["shards"]["counts"]

    for found in start(run_rank, world_size, tmp_path):
        for data, expected in alone.items():
            assert found[data] == json.loads(json.dumps(expected))
        assert found["image error"] == "rank 1: MemoryError: no room on this rank"
        assert found["text error"] == "rank 1: ValueError: no words on this rank"
        assert "there is no shard" in found["no shards"]
        assert found["stopped"] == "every rank: ValueError: stopped"
        assert found["no names"].startswith("every rank: ValueError: class names: expected")
        assert found["num_finished"] == world_size

    # What several ranks had finished is good for another number of them.
    for found in start(continue_rank, 5 - world_size, tmp_path):
        assert found == json.loads(json.dumps(alone["tree"]))
    assert alone["tree"]["metrics"]["num_images"] == sum(COUNTS.values())
    assert len(alone["tree"]["unreadable"]) == 1
    assert Counter(COUNTS.values()) == Counter(alone["tree"]["counts"][0])


def test_more_processes_than_images(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", {"zebra": 1, "kite": 1})
    alone = evaluate(tree, ToyClip())
    for found in start(continue_rank, 3, tmp_path):
        assert found == json.loads(json.dumps(alone))


@pytest.mark.parametrize("num_items", [0, 1, 2, 7, 12])
@pytest.mark.parametrize("num_parts", [1, 2, 5])
def test_shares_add_up(num_items: int, num_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    items = list(range(num_items))
    parts = [ranks.split(items, part, num_parts) for part in range(num_parts)]
    assert [item for part in parts for item in part] == items
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    shares = []
    for rank in range(num_parts):
        monkeypatch.setattr(ranks, "rank_and_world_size", lambda rank=rank: (rank, num_parts))
        shares.append(ranks.share(items))
    assert ranks.interleave(shares, num_items) == items
