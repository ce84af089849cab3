"""Random changes to training images, a whole batch at a time on its device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

PADDING = 4


def flip_and_crop(images: Tensor) -> Tensor:
    """Mirror half of the images; pad half of them with 4 zeros a side and cut a random piece of the old size.

    images: [n, channels, height, width], normalised before, so that the border is the mean colour. As in the FedDyn
    program. Draws only from the default generator of the images' device.
    """
    n, channels, height, width = images.shape
    device = images.device
    mirrored = torch.rand(n, 1, 1, 1, device=device) < 0.5
    images = torch.where(mirrored, images.flip(3), images)
    cropped = torch.rand(n, 1, device=device) < 0.5
    # An image that is not cropped is cut out of its padding where it was put.
    offset = torch.where(cropped, torch.randint(2 * PADDING + 1, (n, 2), device=device), PADDING)
    rows = offset[:, :1] + torch.arange(height, device=device)
    columns = offset[:, 1:] + torch.arange(width, device=device)
    padded = functional.pad(images, (PADDING,) * 4)
    image, channel = torch.arange(n, device=device), torch.arange(channels, device=device)
    return padded[image[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None, :]]
