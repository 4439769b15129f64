"""Local mixing of values: a depthwise convolution over neighbouring tokens, O(N) like the attention."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def mix_grid(values: Tensor, weight: Tensor, grid: tuple[int, int]) -> Tensor:
    """Depthwise 3 x 3 convolution over the patches, the last rows * columns tokens; 0 for those before.

    Args:
        values: (B, N, C).
        weight: (C, 3, 3).
        grid: rows and columns.

    Returns:
        (B, N, C).
    """
    rows, columns = grid
    num_prefix = values.shape[1] - rows * columns
    if num_prefix < 0:
        raise ValueError(
            f"{values.shape[1]} tokens for a grid of {rows} x {columns} patches; value mixing needs all of them "
            "(no patch dropout)"
        )
    patches = values[:, num_prefix:].unflatten(1, grid).permute(0, 3, 1, 2)
    mixed = F.conv2d(patches, weight[:, None].to(values.dtype), padding=1, groups=values.shape[2])
    return F.pad(mixed.flatten(2).transpose(1, 2), (0, 0, num_prefix, 0))


def mix_sequence(values: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution: token i from tokens i - 2, i - 1 and i.

    Args:
        values: (B, N, C).
        weight: (C, 3), the last for the token itself.

    Returns:
        (B, N, C).
    """
    padded = F.pad(values, (0, 0, 2, 0)).transpose(1, 2)
    return F.conv1d(padded, weight[:, None].to(values.dtype), groups=values.shape[2]).transpose(1, 2)
