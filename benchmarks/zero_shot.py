"""Images a second of `ZeroShot` and of a plain OpenCLIP loop, on the same images and classes.

    python benchmarks/zero_shot.py --model ViT-nano-8 --workers 2
    python benchmarks/zero_shot.py --model ViT-B-16 --tree val --classnames imagenet-1k --device cuda

The plain loop is that of OpenCLIP's README and trainer: ImageFolder, DataLoader, encode_image, logits,
top-k. Both have their text features beforehand; ours hashes the weights in each round, to know them again.
They take turns, and the best of the rounds counts, because other work on the machine only ever slows one
down. Without --tree, pictures of noise are made.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import open_clip
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from clip_la.bundle import ClipBundle, build, resolve_model_config
from clip_la.evaluate.cache import EvaluationCache
from clip_la.evaluate.features import encode_class_names
from clip_la.evaluate.zeroshot import ZeroShot

Round = Callable[[], int]
"""Evaluates once; the number of images."""


def our_round(arguments: argparse.Namespace, bundle: ClipBundle, folder: Path) -> Round:
    """The package's evaluator; its text features come from its cache."""
    evaluator = ZeroShot(
        arguments.tree,
        arguments.classnames,
        arguments.templates,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        cache=EvaluationCache(folder / "cache"),
    )
    return lambda: int(evaluator.run(bundle)["num_images"])


def plain_round(arguments: argparse.Namespace, bundle: ClipBundle) -> Round:
    """OpenCLIP's loop."""
    data = ImageFolder(str(arguments.tree), bundle.preprocess_val)
    loader = DataLoader(
        data,
        batch_size=arguments.batch_size,
        num_workers=arguments.workers,
        pin_memory=bundle.device.type == "cuda",
    )
    evaluator = ZeroShot(arguments.tree, arguments.classnames, arguments.templates)
    names = [evaluator.classes.names[evaluator.mapping.class_of[folder]] for folder in data.classes]
    weights = encode_class_names(bundle, names, evaluator.templates).T

    @torch.inference_mode()
    def evaluate() -> int:
        num_images, top1, top5 = 0, 0.0, 0.0
        for images, target in loader:
            target = target.to(bundle.device)
            with bundle.autocast():
                features = bundle.model.encode_image(
                    images.to(bundle.device, bundle.input_dtype), normalize=True
                )
                logits = 100.0 * features.float() @ weights
            found = logits.topk(min(5, len(names)), 1)[1].t() == target.view(1, -1)
            top1 += found[:1].float().sum().item()
            top5 += found.float().sum().item()
            num_images += len(images)
        return num_images

    return evaluate


def make_tree(root: Path, arguments: argparse.Namespace) -> Path:
    """JPEGs of noise, in folders called after ImageNet's first classes."""
    rng = np.random.default_rng(0)
    size = arguments.picture_size
    for index, name in enumerate(open_clip.IMAGENET_CLASSNAMES[: arguments.num_classes]):
        (root / name).mkdir(parents=True)
        for number in range(arguments.num_images // arguments.num_classes):
            small = rng.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8)
            image = Image.fromarray(small).resize((size, size * 3 // 4))
            image.save(root / name / f"{index}-{number}.jpg", quality=90)
    names = "\n".join(open_clip.IMAGENET_CLASSNAMES[: arguments.num_classes])
    (root / "classnames.txt").write_text(names, encoding="utf-8")
    return root


def main() -> None:
    """Print a line for each loop, and their ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="ViT-nano-8")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tree", type=Path, help="default: made for the occasion")
    parser.add_argument("--classnames", help="of --tree; default: classnames.txt in it")
    parser.add_argument("--templates", default="photo")
    parser.add_argument("--num-images", type=int, default=2000, help="made where there is no --tree")
    parser.add_argument("--num-classes", type=int, default=100)
    parser.add_argument("--picture-size", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()

    bundle = build(
        resolve_model_config(arguments.model),
        model_name=arguments.model,
        precision=arguments.precision,
        device=arguments.device,
    )
    bundle.model.eval()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments.tree = arguments.tree or make_tree(folder / "tree", arguments)
        rounds = {"ours": our_round(arguments, bundle, folder), "plain": plain_round(arguments, bundle)}
        rounds["ours"]()  # fills its cache of text features
        best = dict.fromkeys(rounds, 0.0)
        for _ in range(arguments.rounds):
            for loop, evaluate in rounds.items():
                start = time.perf_counter()
                num_images = evaluate()
                best[loop] = max(best[loop], num_images / (time.perf_counter() - start))
    for loop, images_per_second in best.items():
        print(f"{loop:6s} {images_per_second:8.1f} images/s with {arguments.workers} workers")
    print(f"ratio  {best['ours'] / best['plain']:8.2f}")


if __name__ == "__main__":
    main()
