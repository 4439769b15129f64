"""The shared hostile shards, where they are at hand; the other tests build the same kinds themselves."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from shard_builders import byte_tokenize, decode_tokens

from clip_la.data.check import check_data
from clip_la.data.loader import NoUsableSamples, TrainLoader
from clip_la.data.spec import DataSpec

GOOD = range(8)
# What the case's own sample (not one of the good ones) comes to; None: it is used as well.
LOSSES: dict[str, dict[str, int]] = {
    "control_good": {},
    "tar_truncated_in_data": {"member_truncated": 1, "shard_truncated": 1},
    "tar_truncated_in_header": {"shard_truncated": 1},
    "tar_empty": {"shard_empty": 1},
    "tar_zero_length": {"shard_empty": 1},
    "tar_is_gzip": {},
    "tar_is_text": {"shard_not_a_tar": 1},
    "tar_missing_file": {"shard_missing": 1},
    "tar_only_missing": {"shard_missing": 1},
    "tar_all_bad": {"image_empty": 9},
    "tar_size_lie": {"member_too_large": 1, "shard_truncated": 1},
    "tar_symlink": {"link": 1},
    "tar_pickle": {},
    "key_missing_txt": {"no_text": 1},
    "key_missing_jpg": {"no_image": 1},
    "key_boundary_merge": {"no_image": 1, "no_text": 1},
    "key_dup_across": {},
    "key_dotdot": {},
    "key_uppercase": {},
    "key_two_images": {"extra_image": 1},
    "img_zero_byte": {"image_empty": 1},
    "img_corrupt": {"image_corrupt": 1},
    "img_truncated": {"image_corrupt": 1},
    "img_html": {"image_format": 1},
    "img_svg": {"image_format": 1},
    "img_png16": {},
    "img_rgba": {},
    "img_webp": {},
    "img_1x1": {},
    "img_strip": {"image_aspect_ratio": 1},
    "img_bomb_50000": {"image_too_many_pixels": 1},
    "img_bomb_9400": {"image_too_many_pixels": 1},
    "img_bomb_16000": {"image_too_many_pixels": 1},
    "txt_empty": {"text_empty": 1},
    "txt_space": {"text_empty": 1},
    "txt_latin1": {"text_encoding": 1},
    "txt_bom": {},
    "txt_100k": {},
    "txt_100k_word": {},
    "json_broken": {},
    "json_missing": {},
}
# Cut or damaged so that some good samples are not there at all.
GOOD_NUMBERS: dict[str, Iterable[int]] = {
    "tar_truncated_in_data": range(5),
    "tar_truncated_in_header": range(5),
    "tar_size_lie": range(4),
    "tar_only_missing": (),
    "tar_all_bad": (),
    "key_boundary_merge": (0, 1, 2, 3, 5, 6),
}


def mean_colour(image: Image.Image) -> torch.Tensor:
    """(3,) float32: the middle pixel."""
    return torch.from_numpy(np.asarray(image)[image.height // 2, image.width // 2].astype(np.float32))


@pytest.fixture(scope="module")
def colours(shared_data: Path) -> dict[int, torch.Tensor]:
    """The colour of each good sample, by its number."""
    with tarfile.open(shared_data / "hostile" / "control_good" / "00000.tar") as archive:
        files = (archive.extractfile(f"{number:09d}.jpg") for number in GOOD)
        return {number: mean_colour(Image.open(file)) for number, file in zip(GOOD, files, strict=True)}


def spec_of(case: str, shared_data: Path, **options: object) -> DataSpec:
    folder = shared_data / "hostile"
    urls = json.loads((folder / "cases.json").read_text())[case]["urls"]
    return DataSpec("::".join(str(folder / url) for url in urls.split("::")), batch_size=1, **options)


@pytest.mark.parametrize("case", LOSSES)
def test_hostile(case: str, shared_data: Path, colours: dict[int, torch.Tensor]) -> None:
    report = check_data(spec_of(case, shared_data), byte_tokenize, progress=False)
    assert report.losses.to_counts() == LOSSES[case]
    for loss in report.losses.first.values():
        assert loss.shard.endswith(".tar")

    good = set(GOOD_NUMBERS.get(case, GOOD))
    loader = TrainLoader(
        spec_of(case, shared_data, num_samples=max(1, report.num_usable)), mean_colour, byte_tokenize
    )
    if not report.num_usable:
        with pytest.raises(NoUsableSamples, match=next(iter(LOSSES[case]))):
            next(iter(loader))
        return
    found = set()
    for batch, _ in zip(loader, range(loader.num_batches), strict=False):
        words = decode_tokens(batch.texts[0]).split()
        if words[:2] == ["good", "number"] and int(words[2]) in GOOD:
            number = int(words[2])
            found.add(number)
            assert (batch.images[0] - colours[number]).abs().max() < 12, "an image with another's caption"
    assert found == good


def test_every_shared_case_has_an_expectation(shared_data: Path) -> None:
    assert set(json.loads((shared_data / "hostile" / "cases.json").read_text())) == set(LOSSES)
