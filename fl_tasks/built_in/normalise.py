"""Normalisation of images that are kept as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Normalise:
    """(image / 255 - mean) / std with the values of each channel: bytes [n, channels, height, width] to float32."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images: Tensor) -> Tensor:
        """See the class."""
        whole, mean, std = _constants(self, images.device)
        # In place: each other operation would make one more copy of the floats.
        return images.to(torch.float32, copy=True).div_(whole).sub_(mean).div_(std)


@lru_cache(maxsize=16)
def _constants(values: Normalise, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """255, mean and std as tensors of the device: CUDA replaces a division by a number with a product of its inverse.

    So all devices have the same bits, and no step copies numbers to a device.
    """
    mean, std = (torch.tensor(value).view(-1, 1, 1).to(device) for value in (values.mean, values.std))
    return torch.full((1, 1, 1), 255.0, device=device), mean, std
