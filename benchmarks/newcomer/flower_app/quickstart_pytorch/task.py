"""The network, the generated images, and the training of one client."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLASSES, IMAGES, SIZE = 3, 200, 28


def network() -> nn.Module:
    """The network of the template `image` of `fl new`."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16 * 6 * 6, CLASSES)),
    )


def images(site: int) -> tuple[Tensor, Tensor]:
    """Inputs [n, 1, SIZE, SIZE] and classes [n]: bars at one of three heights, with noise."""
    generator = torch.Generator().manual_seed(site)
    classes = torch.randint(CLASSES, (IMAGES,), generator=generator)
    inputs = torch.rand(IMAGES, 1, SIZE, SIZE, generator=generator)
    for image, label in zip(inputs, classes, strict=True):
        image[0, 4 + 8 * int(label) : 8 + 8 * int(label)] += 1
    return inputs, classes


def train(model: nn.Module, site: int, rate: float) -> float:
    """Two epochs; returns the last loss."""
    inputs, classes = images(site)
    optimizer, loss = torch.optim.SGD(model.parameters(), rate), torch.zeros(())
    for _ in range(2):
        for chosen in torch.randperm(IMAGES).split(16):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs[chosen]), classes[chosen])
            loss.backward()
            optimizer.step()
    return float(loss)
