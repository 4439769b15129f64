from __future__ import annotations

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from torchvision.transforms import Compose, Grayscale, Normalize, ToTensor

from clip_la.data.transform import BatchTransform

NOISE = np.random.default_rng(0).integers(0, 256, (20, 48, 40, 3), dtype=np.uint8)
PICTURES = [Image.fromarray(noise) for noise in NOISE]


@pytest.mark.parametrize("is_train", [True, False])
@pytest.mark.parametrize("jitter", [None, {"color_jitter": (0.3, 0.3, 0.3, 0.1), "color_jitter_prob": 1.0}])
def test_openclips_transforms_to_the_bit(is_train: bool, jitter: dict[str, object] | None) -> None:
    preprocess = open_clip.image_transform(32, is_train=is_train, aug_cfg=jitter)
    transform = BatchTransform(preprocess)
    torch.manual_seed(0)
    expected = torch.stack([preprocess(picture) for picture in PICTURES])
    torch.manual_seed(0)
    first = [transform.first(picture) for picture in PICTURES]
    found = transform.stack(first)
    assert first[0].dtype == torch.uint8, "the batch was not done at once"
    assert torch.equal(found, expected)
    assert found.is_contiguous()


def test_any_other_transform_is_applied_as_it_is() -> None:
    transform = BatchTransform(ToTensor())
    found = transform.stack([transform.first(picture) for picture in PICTURES])
    assert torch.equal(found, torch.stack([ToTensor()(picture) for picture in PICTURES]))


def test_grey_pictures_are_refused() -> None:
    transform = BatchTransform(Compose([Grayscale(), ToTensor(), Normalize(0.5, 0.5)]))
    with pytest.raises(TypeError, match="mode L"):
        transform.first(PICTURES[0])
