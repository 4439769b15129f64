"""Small shards for the tests: pair i is a picture of colour i with the text "good number i"."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from clip_la.data.losses import LossCounter
from clip_la.data.samples import RawSample, read_shard
from clip_la.data.spec import Limits
from clip_la.data.storage import OpenOptions

Entry = tuple[str, bytes]


def colour(number: int) -> tuple[int, int, int]:
    """A colour that tells pair `number` from all others."""
    return number % 6 * 50, number // 6 * 30 % 256, 128


def encode_image(image: Image.Image, image_format: str = "PNG", **options: object) -> bytes:
    """The bytes of a picture file."""
    file = io.BytesIO()
    image.save(file, image_format, **options)
    return file.getvalue()


def picture(number: int) -> bytes:
    """A small picture in colour `number`."""
    return encode_image(Image.new("RGB", (8, 8), colour(number)))


def pair(number: int, key: str | None = None) -> list[Entry]:
    """The members of one good sample."""
    key = f"{number:09d}" if key is None else key
    return [(f"{key}.jpg", picture(number)), (f"{key}.txt", text(number)), (f"{key}.json", b"{}")]


def text(number: int) -> bytes:
    """The caption of pair `number`."""
    return f"good number {number}".encode()


def tar_bytes(entries: Iterable[Entry], tar_format: int = tarfile.GNU_FORMAT) -> bytes:
    """An archive of regular files."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tar_format) as archive:
        for name, data in entries:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def good_tar(numbers: Iterable[int]) -> bytes:
    """An archive of good pairs."""
    return tar_bytes(entry for number in numbers for entry in pair(number))


def write_shards(folder: Path, shards: Iterable[Iterable[int]]) -> str:
    """Good shards, as the glob that names them."""
    for index, numbers in enumerate(shards):
        (folder / f"{index:05d}.tar").write_bytes(good_tar(numbers))
    return f"{folder}/*.tar"


def read(path: Path, limits: Limits | None = None) -> tuple[list[RawSample], LossCounter]:
    """All that the shard reader finds in a file."""
    samples, losses = [], LossCounter()
    for item in read_shard(str(path), limits or Limits(), OpenOptions()):
        if isinstance(item, RawSample):
            samples.append(item)
        else:
            losses.add(item)
    return samples, losses


def read_bytes(
    tmp_path: Path, data: bytes, limits: Limits | None = None
) -> tuple[list[RawSample], LossCounter]:
    """All that the shard reader finds in an archive given as bytes."""
    path = tmp_path / "shard.tar"
    path.write_bytes(data)
    return read(path, limits)


def numbers_of(samples: Iterable[RawSample]) -> list[int]:
    """Numbers of good pairs; fails on a wrong pair."""
    found = []
    for sample in samples:
        number = int(sample.text.split()[-1])
        assert sample.text == text(number)
        assert sample.image == picture(number), "an image with the caption of another"
        found.append(number)
    return found


CONTEXT_LENGTH = 40


def byte_tokenize(texts: list[str]) -> torch.Tensor:
    """Start 300, the UTF-8 bytes, end 301, zeros."""
    rows = torch.zeros(len(texts), CONTEXT_LENGTH, dtype=torch.int64)
    for row, caption in zip(rows, texts, strict=True):
        tokens = [300, *caption.encode()[: CONTEXT_LENGTH - 2], 301]
        row[: len(tokens)] = torch.tensor(tokens)
    return rows


def decode_tokens(row: torch.Tensor) -> str:
    """The text of `byte_tokenize`'s row."""
    return bytes(token for token in row.tolist() if 0 < token < 256).decode()


def to_tensor(image: Image.Image) -> torch.Tensor:
    """(3, 4, 4) float32 in 0..255."""
    return torch.from_numpy(np.asarray(image.resize((4, 4))).astype(np.float32)).permute(2, 0, 1)


def augment(image: Image.Image) -> torch.Tensor:
    """`to_tensor` with random noise on one pixel, so that unequal random numbers show."""
    tensor = to_tensor(image)
    tensor[0, 0, 0] = torch.rand(())
    tensor[1, 0, 0] = float(np.random.rand())  # noqa: NPY002 - what transforms use
    return tensor


def batch_numbers(images: torch.Tensor, texts: torch.Tensor) -> Iterator[int]:
    """Numbers of a batch's good pairs; fails on a wrong pair."""
    for image, row in zip(images, texts, strict=True):
        number = int(decode_tokens(row).split()[-1])
        assert tuple(image[:, 2, 2].int().tolist()) == colour(number), "an image with the caption of another"
        yield number
