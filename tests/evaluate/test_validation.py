"""The validation loss: a fixed number of negatives, the data's own order, any number of readers."""

from __future__ import annotations

import io
import json
import math
import random
import socket
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from PIL import Image
from torch import Tensor
from toy_clip import ToyClip, toy_bundle

from clip_la.data.losses import Loss
from clip_la.data.source import open_units
from clip_la.data.spec import DataSpec
from clip_la.evaluate.pairs import read_share
from clip_la.evaluate.validation import ValidationLoss, block_losses, standard_error

NUM_PAIRS = (20, 7, 16)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three tars of one-colour pictures with captions; the second has a caption without a picture too."""
    rng = random.Random(0)
    for shard, count in enumerate(NUM_PAIRS):
        with tarfile.open(tmp_path / f"{shard:05}.tar", "w") as tar:
            for index in range(count):
                png = io.BytesIO()
                Image.new("RGB", (8, 8), tuple(rng.randrange(256) for _ in range(3))).save(png, "png")
                add(tar, f"{index:04}.png", png.getvalue())
                add(tar, f"{index:04}.txt", f"number {rng.randrange(1000)} of {index}".encode())
            if shard == 1:
                add(tar, "9999.txt", b"no picture")
    return tmp_path


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def spec(shards: Path, **options: Any) -> DataSpec:
    return DataSpec(f"{shards}/{{00000..00002}}.tar", **{"batch_size": 6, **options})


def info_nce(images: Tensor, texts: Tensor, scale: float) -> float:
    """Both directions, pair by pair, in Python floats."""
    scores = (scale * images.double() @ texts.double().T).tolist()
    total = 0.0
    for rows in (scores, list(zip(*scores, strict=True))):
        total += sum(math.log(sum(map(math.exp, row))) - row[index] for index, row in enumerate(rows))
    return total / (2 * len(scores))


def test_block_losses_equal_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    images, texts = (
        torch.nn.functional.normalize(torch.randn(25, 8, generator=generator), dim=1) for _ in "ab"
    )
    losses = block_losses(images, texts, 7.0, 10)
    expected = [info_nce(images[start : start + 10], texts[start : start + 10], 7.0) for start in (0, 10)]
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)
    assert standard_error(losses) == pytest.approx(abs(expected[0] - expected[1]) / 2, rel=1e-4)
    assert standard_error(losses[:1]) is None


def test_chance_is_the_log_of_the_block_size() -> None:
    same = torch.nn.functional.normalize(torch.ones(64, 4), dim=1)
    assert block_losses(same, same, 100.0, 32).tolist() == pytest.approx([math.log(32)] * 2)


def test_counts_and_losses(shards: Path) -> None:
    metrics = ValidationLoss(spec(shards), block_size=10).run(toy_bundle())
    assert metrics["num_pairs"] == sum(NUM_PAIRS)
    assert metrics["num_negatives"] == 9
    assert metrics["num_pairs_left_out"] == 3
    assert metrics["num_unusable"] == 1
    assert metrics["num_texts"] == 43
    assert metrics["loss"] > 0
    assert metrics["loss_standard_error"] > 0
    json.dumps(metrics, allow_nan=False)


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 100}, {"workers": 2}])
def test_batches_and_workers_change_nothing(shards: Path, options: dict[str, int]) -> None:
    one = ValidationLoss(spec(shards), block_size=10).run(toy_bundle())
    other = ValidationLoss(spec(shards, **options), block_size=10).run(toy_bundle())
    assert other == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize("num_readers", [1, 2, 5, 60])
@pytest.mark.parametrize("limit", [11, 43, 99])
def test_readers_share_the_samples(shards: Path, num_readers: int, limit: int) -> None:
    source = open_units(spec(shards))
    items = [list(read_share(source, reader, num_readers, limit)) for reader in range(num_readers)]
    positions = [item[0] for share in items for item in share if not isinstance(item, Loss)]
    assert sorted(positions) == list(range(min(limit, 43)))
    num_losses = sum(isinstance(item, Loss) for share in items for item in share)
    assert num_losses == (0 if limit == 11 else 1)


def test_a_table_gives_what_shards_give(shards: Path) -> None:
    lines = ["filepath\ttitle"]
    for shard in range(3):
        with tarfile.open(shards / f"{shard:05}.tar") as tar:
            for member in tar.getmembers():
                path = shards / f"{shard}-{member.name}"
                path.write_bytes(tar.extractfile(member).read())  # type: ignore[union-attr]
                if path.suffix == ".png":
                    lines.append(f"{path}\t{{}}")
                elif "{}" in lines[-1]:
                    lines[-1] = lines[-1].format(path.read_text())
    (shards / "pairs.tsv").write_text("\n".join(lines))
    table = ValidationLoss(DataSpec(str(shards / "pairs.tsv"), batch_size=6, workers=2), block_size=10)
    expected = ValidationLoss(spec(shards), block_size=10).run(toy_bundle())
    assert table.run(toy_bundle()) == pytest.approx({**expected, "num_unusable": 0}, rel=1e-6)


def test_limits(shards: Path) -> None:
    metrics = ValidationLoss(spec(shards, num_samples=23, workers=2), block_size=5, num_retrieval=7).run(
        toy_bundle()
    )
    assert metrics["num_pairs"] == 23
    assert metrics["num_images"] == metrics["num_texts"] == 7
    assert "num_texts" not in ValidationLoss(spec(shards), block_size=5, num_retrieval=0).run(toy_bundle())


def test_too_few_pairs(shards: Path) -> None:
    with pytest.raises(ValueError, match="43 validation pairs are fewer than a block of 64"):
        ValidationLoss(spec(shards), block_size=64).run(toy_bundle())


def test_no_usable_pair(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        add(tar, "0.txt", b"alone")
    with pytest.raises(ValueError, match="no usable pair; lost 1 no_image"):
        ValidationLoss(DataSpec(str(tmp_path / "bad.tar"), batch_size=4)).run(toy_bundle())


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no shard matches"):
        ValidationLoss(DataSpec(f"{tmp_path}/*.tar", batch_size=4))


def test_leaves_mode_and_random_state_alone(shards: Path) -> None:
    model = ToyClip().train()
    torch.manual_seed(12345)
    random.seed(12345)
    state, python_state = torch.get_rng_state(), random.getstate()
    ValidationLoss(spec(shards), block_size=10).run(toy_bundle(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state
    assert model.modes_seen == {False}
    assert model.training


def run_rank(rank: int, world_size: int, port: int, shards: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    metrics = ValidationLoss(spec(shards), block_size=10).run(toy_bundle())
    (shards / f"rank{rank}.json").write_text(json.dumps(metrics))
    dist.destroy_process_group()


def test_two_processes_give_what_one_gives(shards: Path) -> None:
    alone = ValidationLoss(spec(shards), block_size=10).run(toy_bundle())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    mp.start_processes(run_rank, (2, port, shards), nprocs=2, start_method="fork")
    for rank in range(2):
        assert json.loads((shards / f"rank{rank}.json").read_text()) == pytest.approx(alone, rel=1e-6)
