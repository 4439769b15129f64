"""A picture's preprocessing in two parts: what each picture needs, and what a batch can have at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import Compose, Normalize, ToTensor
from torchvision.transforms.functional import normalize

TOGETHER = 16  # pictures that stay in the processor's cache between one operation and the next

Preprocess = Callable[[Image.Image], torch.Tensor]


class BatchTransform:
    """`preprocess` for a batch: `stack([first(x), ...])` is the stack of `preprocess(x)`, to the bit.

    OpenCLIP's transforms end in ToTensor and Normalize. Done for a batch at once these cost a quarter;
    any other `preprocess` is applied picture by picture.

    Args:
        preprocess: PIL picture (RGB) -> (3, H, W) float32.
    """

    def __init__(self, preprocess: Preprocess) -> None:
        steps = preprocess.transforms if isinstance(preprocess, Compose) else []
        ends_in_arithmetic = len(steps) > 2 and isinstance(steps[-2], ToTensor)
        self._normalise = steps[-1] if ends_in_arithmetic and isinstance(steps[-1], Normalize) else None
        self._first = Compose(steps[:-2]) if self._normalise is not None else preprocess

    def first(self, image: Image.Image) -> torch.Tensor:
        """One picture as `stack` takes it: (H, W, 3) uint8, or (3, H, W) float32 where nothing is left."""
        picture = self._first(image)
        if self._normalise is None:
            return picture
        if picture.mode != "RGB":
            raise TypeError(f"the transform gave a picture of mode {picture.mode}; expected RGB")
        return torch.from_numpy(np.array(picture))

    def stack(self, pictures: Sequence[torch.Tensor]) -> torch.Tensor:
        """(b, 3, H, W) float32 from b pictures."""
        if self._normalise is None:
            return torch.stack(list(pictures))
        height, width, channels = pictures[0].shape
        batch = torch.empty(len(pictures), channels, height, width, dtype=torch.float32)
        for start in range(0, len(pictures), TOGETHER):
            part = batch[start : start + TOGETHER]
            part.copy_(torch.stack(list(pictures[start : start + TOGETHER])).permute(0, 3, 1, 2))
            normalize(part.div_(255), self._normalise.mean, self._normalise.std, inplace=True)
        return batch
