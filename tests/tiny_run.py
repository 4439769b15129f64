"""A run of a tiny linear model that takes seconds to train, for tests of what is done with trained models."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from clip_la.cli import main

Colour = tuple[int, int, int]
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 220), "white": (240, 240, 240)}
RECOMMENDED = {"kind": "eq7", "gain": "learned", "scale": "length", "centre_values": True}
"""The attention of the -LA-centred models."""
SAMPLES = 32


def picture(left: Colour, right: Colour | None = None) -> bytes:
    """A PNG of 32 x 32 pixels in one colour, or its right half in another."""
    image = Image.new("RGB", (32, 32), left)
    if right is not None:
        image.paste(right, (16, 0, 32, 32))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    """A shard of these members, in this order."""
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def colour_shard(path: Path, num_pairs: int = 16) -> Path:
    """Pairs of a colour and its name, as img2dataset writes them."""
    members: dict[str, bytes] = {}
    for index in range(num_pairs):
        name = list(COLOURS)[index % len(COLOURS)]
        url = json.dumps({"url": f"https://example.org/{index}.jpg", "width": 32})
        members |= {f"{index:09d}.jpg": picture(COLOURS[name]), f"{index:09d}.txt": name.encode()}
        members |= {f"{index:09d}.json": url.encode()}
    return write_tar(path, members)


def two_colour_shards(folder: Path) -> str:
    """Shards of pictures whose halves have the colours that the caption names, and sizes.json: 64 pairs."""
    num_shards, shard_size = 4, 16
    pairs = [(left, right) for left in COLOURS for right in COLOURS]
    for shard in range(num_shards):
        members: dict[str, bytes] = {}
        for index in range(shard_size):
            left, right = pairs[(index + shard) % len(pairs)]
            key = f"{shard:03d}{index:06d}"
            members[f"{key}.jpg"] = picture(COLOURS[left], COLOURS[right])
            members[f"{key}.txt"] = f"{left} and {right}".encode()
        write_tar(folder / f"{shard:05d}.tar", members)
    (folder / "sizes.json").write_text(json.dumps({f"{n:05d}.tar": shard_size for n in range(num_shards)}))
    return str(folder / "{00000..00003}.tar")


def write_model_config(path: Path, attention: Mapping[str, object] | None, *, text_layers: int = 2) -> Path:
    """A 32-pixel model with two layers in the image tower."""
    config: dict[str, object] = {
        "embed_dim": 32,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8, "head_width": 32},
        "text_cfg": {
            "context_length": 16,
            "vocab_size": 49408,
            "width": 32,
            "heads": 1,
            "layers": text_layers,
        },
    }
    if attention is not None:
        config["attention"] = dict(attention)
    path.write_text(json.dumps(config))
    return path


def train_tiny_run(folder: Path, attention: Mapping[str, object] | None = RECOMMENDED) -> Path:
    """Train and return the run's folder; it has a validation loss and a zero-shot accuracy."""
    shard = colour_shard(folder / "00000.tar")
    model = write_model_config(folder / "ViT-tiny.json", attention)
    for name, colour in COLOURS.items():
        (folder / "tree" / name).mkdir(parents=True)
        (folder / "tree" / name / "one.png").write_bytes(picture(colour))
    (folder / "classnames.txt").write_text("\n".join(COLOURS))
    flags = ["--model", model, "--train-data", shard, "--train-num-samples", 16, "--batch-size", 8]
    flags += ["--epochs", 2, "--warmup", 1, "--lr", "1e-3", "--precision", "fp32", "--workers", 0]
    flags += [
        "--zeroshot",
        folder / "tree",
        "--classnames",
        folder / "classnames.txt",
        "--templates",
        "plain",
    ]
    flags += ["--val-data", shard, "--val-block-size", 4, "--device", "cpu", "--log-every-n-steps", 1]
    assert main(["train", *map(str, flags), "--logs", str(folder / "logs"), "--name", "tiny"]) == 0
    return folder / "logs" / "tiny"
