"""Augmentation of training images, for a whole batch at once on its device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

PADDING = 4


def flip_and_crop(images: Tensor) -> Tensor:
    """Mirror each image with probability 1/2, and with probability 1/2 pad it by 4 zeros and crop it at random.

    images: [n, channels, height, width], normalised, so that the border has the mean colour. The result has the same
    shape. As in the FedDyn program. Uses only the default generator of the images' device.
    """
    n, _, height, width = images.shape
    images = _mirror_half(images)
    cropped = torch.rand(n, 1, device=images.device) < 0.5
    # An image that is not cropped is taken from the middle of its padding.
    offset = torch.where(cropped, torch.randint(2 * PADDING + 1, (n, 2), device=images.device), PADDING)
    return _windows(functional.pad(images, (PADDING,) * 4), offset, (height, width))


def flip_and_cut(images: Tensor, size: int = 24) -> Tensor:
    """Mirror each image with probability 1/2 and crop it to a random square of `size`, uniformly distributed.

    [n, channels, height, width] -> [n, channels, size, size], as McMahan et al., Hsu et al. and Reddi et al. train on
    CIFAR. Uses only the default generator of the images' device.
    """
    n, _, height, width = images.shape
    top, left = (torch.randint(side - size + 1, (n,), device=images.device) for side in (height, width))
    return _windows(_mirror_half(images), torch.stack([top, left], dim=1), (size, size))


def _mirror_half(images: Tensor) -> Tensor:
    mirrored = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(mirrored, images.flip(3), images)


def _windows(images: Tensor, offset: Tensor, size: tuple[int, int]) -> Tensor:
    """From each image the window of `size` with its upper left corner at the image's offset, [n, 2]."""
    n, channels = images.shape[:2]
    device = images.device
    rows = offset[:, :1] + torch.arange(size[0], device=device)
    columns = offset[:, 1:] + torch.arange(size[1], device=device)
    image, channel = torch.arange(n, device=device), torch.arange(channels, device=device)
    return images[image[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None, :]]
