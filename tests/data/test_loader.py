from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import open_clip
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from shard_builders import (
    augment,
    batch_numbers,
    byte_tokenize,
    colour,
    good_tar,
    pair,
    picture,
    tar_bytes,
    text,
    to_tensor,
    write_shards,
)

from clip_la.data.loader import Batch, NoUsableSamples, TrainLoader
from clip_la.data.spec import DataSpec
from clip_la.data.urls import ShardListError

SHARDS = [range(10 * shard, 10 * shard + 7 + shard % 2) for shard in range(4)]
NUM_ALONE = sum(number % 4 == 0 for shard in SHARDS for number in shard)
NUMBERS = sorted(number for shard in SHARDS for number in shard)


def make_loader(
    data: str,
    state: dict[str, object] | None = None,
    preprocess: Callable[..., torch.Tensor] = augment,
    **options: object,
) -> TrainLoader:
    defaults = {"batch_size": 3, "num_samples": 24, "shuffle_block": 5, "seed": 3}
    return TrainLoader(DataSpec(data, **{**defaults, **options}), preprocess, byte_tokenize, state)


def take(loader: TrainLoader, num_batches: int) -> list[Batch]:
    batches = iter(loader)
    taken = list(islice(batches, num_batches))
    batches.close()
    return taken


def numbers(batches: list[Batch]) -> list[int]:
    return [number for batch in batches for number in batch_numbers(batch.images, batch.texts)]


def assert_same(left: list[Batch], right: list[Batch]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.texts, other.texts)
        assert (one.epoch, one.index, one.state) == (other.epoch, other.index, other.state)


@pytest.fixture
def shards(tmp_path: Path) -> str:
    return write_shards(tmp_path, SHARDS)


@pytest.fixture
def spoilt_shards(tmp_path: Path) -> str:
    """Shards in which something is wrong every few members."""
    for index, shard in enumerate(SHARDS):
        entries = []
        for number in shard:
            entries += pair(number)
            if number % 3 == 0:
                entries += [(f"x{number}.jpg", b"no image"), (f"x{number}.txt", text(number))]
            if number % 4 == 0:
                entries.append((f"y{number}.jpg", picture(number)))
        (tmp_path / f"{index}.tar").write_bytes(tar_bytes(entries))
    return f"{tmp_path}/*.tar"


def test_a_pass_holds_every_sample_once(shards: str) -> None:
    loader = make_loader(shards, num_samples=30, batch_size=1)
    assert (loader.num_batches, loader.num_samples) == (30, 30)
    assert sorted(numbers(take(loader, 30))) == NUMBERS


def test_order_is_a_function_of_the_seed(shards: str) -> None:
    first = take(make_loader(shards), 20)
    assert_same(first, take(make_loader(shards), 20))
    assert numbers(first[:8]) != numbers(first[8:16]), "two epochs in one order"
    assert numbers(first) != numbers(take(make_loader(shards, seed=4), 20))
    assert [(batch.epoch, batch.index) for batch in first[6:10]] == [(0, 6), (0, 7), (1, 0), (1, 1)]


def test_augmentation_differs_between_epochs_and_samples(shards: str) -> None:
    noise = torch.cat([batch.images[:, :2, 0, 0] for batch in take(make_loader(shards), 16)]).flatten()
    assert len(set(noise.tolist())) == len(noise)


def test_the_training_process_keeps_its_random_numbers(shards: str) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    batches = iter(make_loader(shards))
    found = []
    for _ in range(3):
        next(batches)
        found.append(torch.rand(()))
    assert torch.equal(torch.stack(found), expected)


def test_ranks_and_workers_share_the_shards(shards: str) -> None:
    per_rank = [
        numbers(
            take(make_loader(shards, rank=rank, world_size=2, workers=2, batch_size=1, num_samples=28), 14)
        )
        for rank in range(2)
    ]
    assert not set(per_rank[0]) & set(per_rank[1])
    assert len(set(per_rank[0] + per_rank[1])) == 28


def test_workers_give_the_same_batches_each_time(shards: str) -> None:
    assert_same(take(make_loader(shards, workers=2), 19), take(make_loader(shards, workers=2), 19))


def test_one_worker_and_none_give_the_same_batches(shards: str) -> None:
    assert_same(take(make_loader(shards, workers=1), 12), take(make_loader(shards, workers=0), 12))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stop=st.integers(1, 30), resampled=st.booleans(), shuffle_block=st.integers(1, 40))
def test_resume_equals_uninterrupted(
    spoilt_shards: str, stop: int, resampled: bool, shuffle_block: int
) -> None:
    options = {"resampled": resampled, "shuffle_block": shuffle_block}
    straight = take(make_loader(spoilt_shards, **options), 36)
    state = json.loads(json.dumps(straight[stop - 1].state))
    resumed = take(make_loader(spoilt_shards, state, **options), 36 - stop)
    assert_same(straight[stop:], resumed)
    assert [batch.losses for batch in straight[stop:]] == [batch.losses for batch in resumed]


@pytest.mark.parametrize("stop", [1, 4, 8, 13])
def test_resume_with_workers_equals_uninterrupted(spoilt_shards: str, stop: int) -> None:
    straight = take(make_loader(spoilt_shards, workers=2), 18)
    resumed = take(make_loader(spoilt_shards, straight[stop - 1].state, workers=2), 18 - stop)
    assert_same(straight[stop:], resumed)


def test_a_new_layout_restarts_at_the_next_epoch(shards: str, caplog: pytest.LogCaptureFixture) -> None:
    state = take(make_loader(shards), 3)[-1].state
    (batch,) = take(make_loader(shards, state, batch_size=2), 1)
    assert (batch.epoch, batch.index) == (1, 0)
    assert "batch_size" in caplog.text
    state = take(make_loader(shards), 8)[-1].state
    assert_same(
        take(make_loader(shards, state, batch_size=2), 2), take(make_loader(shards, batch_size=2), 14)[12:]
    )


def test_losses_are_counted_and_named(spoilt_shards: str) -> None:
    batches = take(make_loader(spoilt_shards, num_samples=30, batch_size=30), 1)
    assert sum((Counter(batch.losses) for batch in batches), Counter())["no_text"] == NUM_ALONE
    assert {loss.cause.value for batch in batches for loss in batch.examples} == {"no_text", "image_format"}
    assert all(loss.shard and loss.key for batch in batches for loss in batch.examples)


def test_losses_travel_from_workers(spoilt_shards: str) -> None:
    batches = take(make_loader(spoilt_shards, workers=2, num_samples=30, batch_size=15), 2)
    assert sum((Counter(batch.losses) for batch in batches), Counter())["no_text"] == NUM_ALONE
    assert len([loss for batch in batches for loss in batch.examples]) == 2, "each cause is named once"


@pytest.mark.parametrize("workers", [0, 2])
def test_no_usable_sample_stops_the_run(tmp_path: Path, workers: int) -> None:
    (tmp_path / "0.tar").write_bytes(tar_bytes([("a.jpg", b""), ("a.txt", b"a"), ("b.cls", b"1")]))
    (tmp_path / "1.tar").write_bytes(b"garbage")
    data = f"{tmp_path}/{{0..2}}.tar"
    with pytest.raises(NoUsableSamples, match=r"1 image_empty[\s\S]*a \(zero bytes\)") as caught:
        take(make_loader(data, workers=workers), 1)
    assert caught.value.counts == {"image_empty": 1, "no_image": 1, "shard_missing": 1, "shard_not_a_tar": 1}


UNUSABLE = {
    "dotted_suffixes": [("x.input.jpg", picture(0)), ("x.outputs.txt", text(0))],
    "class_in_place_of_text": [("x.jpg", picture(0)), ("x.cls", b"3")],
    "empty_tar": [],
}


@pytest.mark.parametrize(
    ("kind", "causes"),
    [
        ("dotted_suffixes", {"no_image": 1}),
        ("class_in_place_of_text", {"no_text": 1}),
        ("empty_tar", {"shard_empty": 1}),
        ("missing", {"shard_missing": 1}),
        ("garbage", {"shard_not_a_tar": 1}),
    ],
)
def test_one_pass_over_unusable_shards_is_enough(kind: str, causes: dict[str, int], tmp_path: Path) -> None:
    shard = tmp_path / "0.tar"
    if kind != "missing":
        shard.write_bytes(tar_bytes(UNUSABLE[kind]) if kind in UNUSABLE else b"garbage" * 500)
    with pytest.raises(NoUsableSamples) as caught:
        take(make_loader(str(shard)), 1)
    assert caught.value.counts == causes
    assert f"first {next(iter(causes))} in {shard}" in str(caught.value)


def test_fewer_samples_a_worker_than_a_batch_are_no_endless_loop(tmp_path: Path) -> None:
    data = write_shards(tmp_path, [range(2), range(10, 12)])
    batches = take(make_loader(data, workers=2, num_samples=6), 4)
    assert set(numbers(batches)) <= {0, 1, 10, 11}
    with pytest.raises(NoUsableSamples):
        take(make_loader(data, workers=2, batch_size=5, num_samples=5), 1)


def test_a_truncated_shard_is_counted_during_training(tmp_path: Path) -> None:
    """32 samples planned, 24 there: each of them once a pass, and the loss in the counters."""
    whole = good_tar(range(8))
    for shard in range(4):
        (tmp_path / f"{shard}.tar").write_bytes(good_tar(range(8 * shard, 8 * shard + 8)))
    (tmp_path / "3.tar").write_bytes(whole[:1000])
    batches = take(make_loader(f"{tmp_path}/{{0..3}}.tar", num_samples=32, batch_size=8), 4)
    assert set(numbers(batches)) == set(range(24))
    counts = sum((Counter(batch.losses) for batch in batches), Counter())
    assert counts["no_text"] >= 1
    assert counts["shard_truncated"] >= 1
    assert any(loss.shard.endswith("3.tar") for batch in batches for loss in batch.examples)


def test_no_sample_is_put_together_from_two_shards(tmp_path: Path) -> None:
    image, _, _ = pair(1, "k")
    _, caption, _ = pair(2, "k")
    (tmp_path / "0.tar").write_bytes(tar_bytes([*pair(0), image]))
    (tmp_path / "1.tar").write_bytes(tar_bytes([caption, *pair(3)]))
    (batch,) = take(make_loader(f"{tmp_path}/{{0..1}}.tar", num_samples=2, batch_size=2), 1)
    assert sorted(numbers([batch])) == [0, 3]
    assert batch.losses == {"no_image": 1, "no_text": 1}


@pytest.mark.parametrize("resampled", [False, True])
def test_fewer_samples_than_a_batch_stop_the_run(shards: str, resampled: bool) -> None:
    with pytest.raises(NoUsableSamples, match="fewer than the 64 usable"):
        take(make_loader(shards, batch_size=64, resampled=resampled), 1)


def test_a_reader_without_usable_shards_reads_those_of_others(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(good_tar(range(9)))
    batches = take(make_loader(f"{tmp_path}/{{0..1}}.tar", workers=2, num_samples=12), 4)
    assert set(numbers(batches)) <= set(range(9))
    assert sum(batch.losses.get("shard_missing", 0) for batch in batches) >= 1


def test_a_batch_holds_no_sample_twice(shards: str) -> None:
    for batch in take(make_loader(shards, batch_size=8, num_samples=80), 30):
        assert len(set(batch_numbers(batch.images, batch.texts))) == 8


def test_uneven_shards_do_not_hang(tmp_path: Path) -> None:
    data = write_shards(tmp_path, [range(40), range(40, 44)])
    found = Counter(numbers(take(make_loader(data, workers=2, num_samples=78), 26)))
    assert len([number for number in found if number < 40]) == 39
    assert sum(count for number, count in found.items() if number >= 40) == 39


@pytest.mark.parametrize(("options", "readers"), [({"workers": 5}, 5), ({"world_size": 3, "workers": 2}, 6)])
def test_fewer_shards_than_readers_are_refused(shards: str, options: dict[str, int], readers: int) -> None:
    with pytest.raises(ValueError, match=f"4 shards can't be shared by {readers} readers"):
        make_loader(shards, **options)
    assert len(take(make_loader(shards, resampled=True, **options), 2)) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_one_shard_for_two_ranks_is_refused_on_both(rank: int, tmp_path: Path) -> None:
    data = write_shards(tmp_path, [range(8)])
    with pytest.raises(ValueError, match=r"1 shards can't be shared by 2 readers \(2 ranks x 1 workers\)"):
        make_loader(data, rank=rank, world_size=2)


def test_size_of_the_virtual_epoch(shards: str, tmp_path: Path) -> None:
    with pytest.raises(ShardListError, match="--train-num-samples"):
        make_loader(shards, num_samples=None)
    (tmp_path / "sizes.json").write_text(json.dumps({f"{index:05d}.tar": 8 for index in range(4)}))
    loader = make_loader(shards, num_samples=None, batch_size=5, world_size=2)
    assert (loader.num_batches, loader.num_samples) == (4, 40)


def test_upsampling(tmp_path: Path) -> None:
    write_shards(tmp_path, [range(8), range(8, 16)])
    data = f"{tmp_path}/00000.tar::{tmp_path}/00001.tar"
    batches = take(make_loader(data, resampled=True, upsampling_factors="0::1"), 10)
    assert set(numbers(batches)) <= set(range(8, 16))


def test_commands_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ShardListError, match="pipe:"):
        make_loader(f"pipe:touch {tmp_path}/ran")
    assert not (tmp_path / "ran").exists()


def test_a_table(tmp_path: Path) -> None:
    rows = "filepath\ttitle\n"
    for number in range(20):
        path = tmp_path / f"{number}.png"
        path.write_bytes(picture(number))
        rows += f"{path}\t{text(number).decode()}\n"
    table = tmp_path / "table.tsv"
    table.write_text(rows + "/no/such.png\tmissing\n")
    loader = make_loader(str(table), num_samples=None)
    assert loader.num_batches == 7
    batches = take(loader, 14)
    assert set(numbers(batches)) == set(range(20))
    assert sum(batch.losses.get("no_image", 0) for batch in batches) >= 2
    resumed = take(make_loader(str(table), batches[4].state, num_samples=None), 9)
    assert_same(batches[5:], resumed)


def test_workers_outlive_signals_and_end_with_the_loader(shards: str) -> None:
    before = set(multiprocessing.active_children())
    batches = iter(make_loader(shards, workers=2))
    next(batches)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    for worker in workers:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(worker.pid or 0, number)
    assert len(list(islice(batches, 20))) == 20
    batches.close()
    assert not set(multiprocessing.active_children()) - before


@pytest.mark.slow
def test_spawned_workers_with_openclips_tokenizer_and_transform(shards: str) -> None:
    spec = DataSpec(shards, batch_size=3, num_samples=24, workers=2, start_method="spawn")
    preprocess = open_clip.image_transform(32, is_train=True)
    spawned = take(TrainLoader(spec, preprocess, open_clip.get_tokenizer("ViT-B-32")), 3)
    forked = DataSpec(shards, batch_size=3, num_samples=24, workers=2, start_method="fork")
    assert_same(spawned, take(TrainLoader(forked, preprocess, open_clip.get_tokenizer("ViT-B-32")), 3))


def test_reading_needs_no_webdataset(shards: str) -> None:
    """Whichever release of webdataset is installed, the grouping is this package's own."""
    code = (
        "import sys; sys.modules['webdataset'] = None\n"
        "from clip_la.data.loader import TrainLoader; from clip_la.data.spec import DataSpec\n"
        "import open_clip, torchvision.transforms as t\n"
        f"spec = DataSpec({shards!r}, batch_size=3, num_samples=24)\n"
        "loader = TrainLoader(spec, t.ToTensor(), open_clip.get_tokenizer('ViT-B-32'))\n"
        "print(next(iter(loader)).images.shape)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "torch.Size([3, 3, 8, 8])", done.stderr


@pytest.mark.slow
def test_memory_of_a_worker_is_flat(shards: str) -> None:
    loader = make_loader(shards, workers=1, num_samples=24)
    batches = iter(loader)

    def resident_mib_after(num_batches: int) -> float:
        list(islice(batches, num_batches))
        (worker,) = multiprocessing.active_children()
        pages = int(Path(f"/proc/{worker.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    early, late = resident_mib_after(8 * 20), resident_mib_after(8 * 180)
    batches.close()
    assert late < early + 8


def test_unusable_settings() -> None:
    for options in (
        {"batch_size": 0},
        {"rank": 1},
        {"seed": -1},
        {"empty_caption": "x"},
        {"dataset_type": "x"},
    ):
        with pytest.raises(ValueError, match=next(iter(options)).split("_")[0]):
            DataSpec("a.tar", **{"batch_size": 1, **options})
    with pytest.raises(ValueError, match="resampled"):
        DataSpec("a.tar", 1, upsampling_factors="1")


def test_a_failing_transform_is_counted(shards: str) -> None:
    def fail_on_some(image: Image.Image) -> torch.Tensor:
        if image.getpixel((0, 0)) == colour(0):
            raise RuntimeError("no")
        return to_tensor(image)

    batches = take(make_loader(shards, preprocess=fail_on_some, num_samples=24), 8)
    assert 0 not in numbers(batches)
    assert sum(batch.losses.get("image_transform", 0) for batch in batches) >= 1
