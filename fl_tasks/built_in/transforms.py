"""Normalisation and augmentation of images that are kept as bytes, a whole batch at once on its device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional


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


PADDING = 4


@dataclass(frozen=True)
class FlipAndCrop:
    """Mirror each image with probability 1/2, and with probability 1/2 pad it by 4 zeros and crop it at random.

    images: [n, channels, height, width], normalised, so that the border has the mean colour. The result has the same
    shape. As in the FedDyn program. Uses only the default generator of the images' device.
    """

    def __call__(self, images: Tensor) -> Tensor:
        """See the class."""
        return self.apply(images, *self.draw(images))

    def draw(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(whether each image is mirrored, [n], the corner of its window in its padding, [n, 2])."""
        n, device = len(images), images.device
        mirrored = _half(n, device)
        cropped = torch.rand(n, 1, device=device) < 0.5
        # An image that is not cropped is taken from the middle of its padding.
        return mirrored, torch.where(cropped, torch.randint(2 * PADDING + 1, (n, 2), device=device), PADDING)

    def apply(self, images: Tensor, *drawn: Tensor) -> Tensor:
        """The windows."""
        mirrored, corner = drawn
        height, width = images.shape[2:]
        return _windows(functional.pad(_mirrored(images, mirrored), (PADDING,) * 4), corner, height, width)


@dataclass(frozen=True)
class FlipAndCut:
    """Mirror each image with probability 1/2 and crop it to a random square of `size`, uniformly distributed.

    [n, channels, height, width] -> [n, channels, size, size], as McMahan et al., Hsu et al. and Reddi et al. train on
    CIFAR. Uses only the default generator of the images' device.
    """

    size: int = 24

    def __call__(self, images: Tensor) -> Tensor:
        """See the class."""
        return self.apply(images, *self.draw(images))

    def draw(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(whether each image is mirrored, [n], the corner of its window, [n, 2])."""
        n, _, height, width = images.shape
        corner = [torch.randint(side - self.size + 1, (n,), device=images.device) for side in (height, width)]
        return _half(n, images.device), torch.stack(corner, dim=1)

    def apply(self, images: Tensor, *drawn: Tensor) -> Tensor:
        """The windows."""
        mirrored, corner = drawn
        return _windows(_mirrored(images, mirrored), corner, self.size, self.size)


def _half(n: int, device: torch.device) -> Tensor:
    return torch.rand(n, 1, 1, 1, device=device).flatten() < 0.5


def _mirrored(images: Tensor, which: Tensor) -> Tensor:
    return torch.where(which.view(-1, 1, 1, 1), images.flip(3), images)


def _windows(images: Tensor, corner: Tensor, height: int, width: int) -> Tensor:
    """The window of this size from each image; its upper left corner is at the image's corner, [n, 2]."""
    # A view of all windows: indices of whole rows are a fifth of the time of indices of pixels.
    windows = images.unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(len(images), device=images.device), :, corner[:, 0], corner[:, 1]]
