"""A small task with pictures of bytes, which are augmented."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fl_tasks import Classifier, Examples, Shard
from fl_tasks.built_in.transforms import FlipAndCut, Normalise


class _Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        """The images with the precision of the model."""
        return images.to(self._dtype)


class Pictures(Classifier):
    """A convolution over pictures of 8x8, trained on pieces of 6x6. precision: "float32" or "float64"."""

    held_out = "thirty more pictures"

    def __init__(self, precision: str = "float32") -> None:
        self._dtype = getattr(torch, precision)

    def model(self) -> nn.Module:
        return nn.Sequential(
            _Cast(self._dtype),
            nn.Conv2d(2, 4, 3, dtype=self._dtype),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 3, dtype=self._dtype),
        )

    def train_data(self, shard: Shard) -> Examples:
        return shard.of(_pictures(120, 0))

    def eval_data(self, shard: Shard | None = None) -> Examples:
        return _pictures(30 if shard is None else 0, 1)


def _pictures(count: int, seed: int) -> Examples:
    random = torch.Generator().manual_seed(seed)
    targets = torch.arange(count) % 3
    bytes_ = torch.randint(128, (count, 2, 8, 8), generator=random, dtype=torch.uint8)
    bytes_[torch.arange(count), targets % 2, :, targets] += 120
    return Examples(bytes_, targets, FlipAndCut(6), Normalise((0.3, 0.3), (0.2, 0.2)))
