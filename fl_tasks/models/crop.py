"""Centre crop, the first layer of networks for cropped images."""

from __future__ import annotations

from torch import Tensor, nn


class CentreCrop(nn.Module):
    """[n, channels, height, width] -> [n, channels, size, size], the centre. Images of that size are unchanged.

    It is part of the network, so that every evaluation crops in the same way. In training the random crops already have
    this size.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, images: Tensor) -> Tensor:
        """Drop floor((height - size) / 2) rows at the top, and columns on the left likewise."""
        top, left = ((side - self.size) // 2 for side in images.shape[-2:])
        return images[..., top : top + self.size, left : left + self.size]
