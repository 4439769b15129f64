"""A CLIP of three dimensions for tests: an image's feature is its mean colour, a text's its colour words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from clip_la.bundle import ClipBundle


class ToyClip(nn.Module):
    """Images (n, 3, h, w) in [0, 1] and tokens (n, 3) become features by one fixed map each."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.modes_seen: set[bool] = set()

    def encode_image(self, images: Tensor) -> Tensor:
        self.modes_seen.add(self.training)
        return images.mean(dim=(2, 3)) - 0.3

    def encode_text(self, tokens: Tensor) -> Tensor:
        self.modes_seen.add(self.training)
        return tokens.float() / 255 - 0.3


def tokenize(texts: str | list[str]) -> Tensor:
    """Sums of character codes, modulo 256: a fixed "colour" for each text."""
    texts = [texts] if isinstance(texts, str) else texts
    return torch.tensor(
        [
            [sum(ord(c) * (i + 1) ** power for i, c in enumerate(text)) % 256 for power in (0, 1, 2)]
            for text in texts
        ]
    )


def to_tensor(image: Image.Image) -> Tensor:
    """uint8 RGB of any size -> float32 (3, 8, 8) in [0, 1]."""
    pixels = np.asarray(image.resize((8, 8)), dtype=np.float32)
    return torch.from_numpy(pixels / 255).permute(2, 0, 1)


def toy_bundle(
    model: nn.Module | None = None, preprocess: Callable[[Image.Image], Tensor] = to_tensor
) -> ClipBundle:
    config: dict[str, Any] = {"embed_dim": 3, "vision_cfg": {}, "text_cfg": {}}
    return ClipBundle(
        model=model or ToyClip(),
        preprocess_train=preprocess,
        preprocess_val=preprocess,
        tokenizer=tokenize,
        model_name="toy",
        model_config=config,
        preprocess_config={},
        precision="fp32",
        device=torch.device("cpu"),
    )
