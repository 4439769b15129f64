"""`clip-la demo-data`: a small image-text set of rendered scenes, and a zero-shot tree held out from it.

    OUT/train/00000.tar ...   pairs in img2dataset's layout, with sizes.json and *_stats.json
    OUT/val/00000.tar         pairs of the same kind, from other random numbers
    OUT/zeroshot/red_circle/  pictures of colour-shape combinations that are in no training scene
    OUT/zeroshot/classnames.txt

The same options give the same bytes (with the same Pillow).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import webdataset
from tqdm import tqdm

from clip_la.data.demo_render import render
from clip_la.data.demo_scene import HELD_OUT, Scene, sample_scene, sample_single, write_caption

SHARDS = 8
_VERSION = 1


class DemoDataError(ValueError):
    """The set can't be made there or so; the message says why."""


@dataclass(frozen=True)
class DemoOptions:
    """What a set is a function of.

    Attributes:
        num_pairs: training pairs, spread over 8 shards.
        num_val_pairs: validation pairs, in one shard.
        images_per_class: pictures of each held-out combination.
        image_size: pixels a side.
        seed: of everything random.
    """

    num_pairs: int = 16_000
    num_val_pairs: int = 1_024
    images_per_class: int = 16
    image_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"num_pairs": SHARDS, "num_val_pairs": 1, "images_per_class": 1, "image_size": 16, "seed": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise DemoDataError(f"{name} is {getattr(self, name)}; expected at least {value}")


def build_demo_data(out: Path, options: DemoOptions | None = None, *, progress: bool = True) -> bool:
    """Make the set, whole or not at all.

    Args:
        out: the folder to make.
        progress: show a bar on stderr.

    Returns:
        True if it was made, False if it was there already, with the same options.

    Raises:
        DemoDataError: something else is at `out`.
    """
    options = options or DemoOptions()
    record = {"version": _VERSION, **asdict(options)}
    if out.exists():
        _refuse_other(out, record)
        return False
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        _write_set(folder, options, progress)
        (folder / "demo.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        folder.chmod(0o755)
        os.replace(folder, out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return True


def _refuse_other(out: Path, record: dict[str, int]) -> None:
    try:
        found = json.loads((out / "demo.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise DemoDataError(f"{out} exists and is not a demo set; give another folder") from None
    if found != record:
        differ = [name for name, value in record.items() if found.get(name) != value]
        raise DemoDataError(
            f"{out} holds a demo set with other {', '.join(differ)}; remove it or give another folder"
        )


def _write_set(folder: Path, options: DemoOptions, progress: bool) -> None:
    for name in ("train", "val", "zeroshot"):
        (folder / name).mkdir()
    counts = [len(range(shard, options.num_pairs, SHARDS)) for shard in range(SHARDS)]
    jobs = [
        partial(_write_shard, folder / "train", shard, count, options) for shard, count in enumerate(counts)
    ]
    jobs.append(partial(_write_shard, folder / "val", 0, options.num_val_pairs, options))
    jobs.append(partial(_write_tree, folder / "zeroshot", options))
    with ProcessPoolExecutor() as pool:
        running = [pool.submit(job) for job in jobs]
        for future in tqdm(running, desc="demo data", unit="part", disable=None if progress else True):
            future.result()
    _write_json(folder / "train" / "sizes.json", {f"{shard:05d}.tar": n for shard, n in enumerate(counts)})
    _write_json(folder / "val" / "sizes.json", {"00000.tar": options.num_val_pairs})


def _write_shard(folder: Path, shard: int, count: int, options: DemoOptions) -> None:
    with webdataset.TarWriter(str(folder / f"{shard:05d}.tar"), encoder=False, mtime=0) as tar:
        for sample in _samples(f"{options.seed}/{folder.name}/{shard}", shard, count, options.image_size):
            tar.write(sample)
    _write_json(folder / f"{shard:05d}_stats.json", _shard_stats(count))


def _shard_stats(count: int) -> dict[str, Any]:
    """What img2dataset tells of a shard. Times are 0, so that the same options give the same bytes."""
    failed = {"failed_to_download": 0, "failed_to_resize": 0}
    times = {"duration": 0.0, "start_time": 0.0, "end_time": 0.0}
    return {"count": count, "successes": count, **failed, **times, "status_dict": {"success": count}}


def _samples(seed: str, shard: int, count: int, image_size: int) -> Iterator[dict[str, str | bytes]]:
    for index in range(count):
        rng = random.Random(f"{seed}/{index}")
        scene = sample_scene(rng)
        caption, key = write_caption(scene, rng), f"{shard:05d}{index:04d}"
        picture = io.BytesIO()
        render(scene, image_size).save(picture, "JPEG", quality=95)
        facts = _facts(scene, caption, key, picture.getvalue(), image_size)
        yield {
            "__key__": key,
            "jpg": picture.getvalue(),
            "txt": caption.encode(),
            "json": json.dumps(facts).encode(),
        }


def _facts(scene: Scene, caption: str, key: str, picture: bytes, image_size: int) -> dict[str, Any]:
    """img2dataset's record of a sample, and the scene that the picture was rendered from."""
    return {
        "url": None,
        "caption": caption,
        "key": key,
        "status": "success",
        "error_message": None,
        "width": image_size,
        "height": image_size,
        "original_width": image_size,
        "original_height": image_size,
        "exif": "{}",
        "sha256": hashlib.sha256(picture).hexdigest(),
        "scene": asdict(scene),
    }


def _write_tree(root: Path, options: DemoOptions) -> None:
    for colour, shape in HELD_OUT:
        folder = root / f"{colour}_{shape}"
        folder.mkdir()
        for index in range(options.images_per_class):
            rng = random.Random(f"{options.seed}/zeroshot/{colour}/{shape}/{index}")
            render(sample_single(rng, (colour, shape)), options.image_size).save(folder / f"{index:03d}.png")
    names = sorted(f"{colour} {shape}" for colour, shape in HELD_OUT)
    (root / "classnames.txt").write_text("\n".join(names) + "\n", encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `DemoOptions`."""
    parser.add_argument("out", type=Path, help="folder to make; one with the same options is left as it is")
    helps = {
        "num_pairs": "training pairs",
        "num_val_pairs": "validation pairs",
        "images_per_class": "pictures of each held-out colour-shape combination",
        "image_size": "pixels a side",
        "seed": "same seed, same bytes",
    }
    for name, text in helps.items():
        default = getattr(DemoOptions, name)
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=default, help=f"{text} (default: {default})")


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    options = DemoOptions(**{name: getattr(args, name) for name in DemoOptions.__dataclass_fields__})
    made = build_demo_data(args.out, options)
    print(f"{'made' if made else 'already there'}: {args.out} ({options.num_pairs:,} training pairs)")
    return 0
