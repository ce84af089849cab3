"""The first step of networks that take a crop: whatever is larger is cut to its centre."""

from __future__ import annotations

from torch import Tensor, nn


class CentreCrop(nn.Module):
    """[n, channels, height, width] -> [n, channels, size, size], the centre; images of that size pass as they are.

    Part of the network, so that every evaluation crops alike; in training the random crops come at the right size.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, images: Tensor) -> Tensor:
        """Cuts floor((height - size) / 2) rows above and the same way to the left."""
        top, left = ((side - self.size) // 2 for side in images.shape[-2:])
        return images[..., top : top + self.size, left : left + self.size]
