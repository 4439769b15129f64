"""Samples a second of this package's loader and of OpenCLIP's own, on the same shards.

    python benchmarks/data_loader.py "shards/{00000..00007}.tar" --num-samples 4000 --workers 2

OpenCLIP's loader needs pandas and webdataset < 0.2.96; where it can't run, that is said and only ours
is timed. The two take turns, and the best of the rounds counts, because other work on the machine only
ever slows one down.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace

import open_clip
import torch

from clip_la.data.loader import TrainLoader
from clip_la.data.spec import DataSpec

Rounds = Iterator[int]  # each item: the samples of one virtual epoch that has just been read


def our_rounds(arguments: argparse.Namespace) -> Rounds:
    """Virtual epochs of this package's loader."""
    spec = DataSpec(
        arguments.shards,
        batch_size=arguments.batch_size,
        num_samples=arguments.num_samples,
        workers=arguments.workers,
    )
    loader = TrainLoader(spec, *transforms(arguments))
    batches = iter(loader)
    while True:
        yield sum(len(batch.images) for batch in islice(batches, loader.num_batches))


def stock_rounds(arguments: argparse.Namespace) -> Rounds:
    """Virtual epochs of OpenCLIP's loader."""
    from open_clip_train.data import get_wds_dataset

    preprocess, tokenizer = transforms(arguments)
    stock_arguments = SimpleNamespace(
        train_data=arguments.shards,
        train_num_samples=arguments.num_samples,
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        world_size=1,
        seed=0,
    )
    data = get_wds_dataset(stock_arguments, preprocess, is_train=True, tokenizer=tokenizer)
    epoch = 0
    while True:
        data.set_epoch(epoch)
        yield sum(len(images) for images, _ in data.dataloader)
        epoch += 1


def transforms(
    arguments: argparse.Namespace,
) -> tuple[Callable[..., torch.Tensor], Callable[[list[str]], torch.Tensor]]:
    """OpenCLIP's training transform and tokenizer."""
    return open_clip.image_transform(arguments.image_size, is_train=True), open_clip.get_tokenizer("ViT-B-16")


def main() -> None:
    """Print a line for each loader, and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shards")
    parser.add_argument("--num-samples", type=int, required=True, help="samples in a virtual epoch")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()

    rounds = {"ours": our_rounds(arguments)}
    try:
        stock = stock_rounds(arguments)
        next(stock)
        rounds["stock"] = stock
    except Exception as error:
        print(f"OpenCLIP's loader can't run here: {error!r}")
    next(rounds["ours"])  # the first epoch starts workers and fills caches

    best = dict.fromkeys(rounds, 0.0)
    for _ in range(arguments.rounds):
        for name, epochs in rounds.items():
            start = time.perf_counter()
            num_samples = next(epochs)
            best[name] = max(best[name], num_samples / (time.perf_counter() - start))
    for name, samples_per_second in best.items():
        print(f"{name:6s} {samples_per_second:8.0f} samples/s with {arguments.workers} workers")
    if "stock" in best:
        print(f"ratio  {best['ours'] / best['stock']:8.2f}")


if __name__ == "__main__":
    main()
