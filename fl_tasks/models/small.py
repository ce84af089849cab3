"""Small networks: the demo's digits, Fashion-MNIST, and CIFAR for comparisons of many methods."""

from __future__ import annotations

from torch import nn


def digits_cnn(num_classes: int = 10) -> nn.Module:
    """For [n, 1, 8, 8]: two padded 3x3 convolutions, 16 and 32 channels, pool, 512-32-10. 21,546 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, num_classes),
    )


def grey_cnn(num_classes: int = 10) -> nn.Module:
    """For [n, 1, 28, 28]: two 5x5 convolutions, 16 and 32 channels, each pooled, 512-128-10. 80,202 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )


def grey_cnn_small(num_classes: int = 10) -> nn.Module:
    """For [n, 1, 28, 28]: two 5x5 convolutions of stride 2, 16 and 32 channels, 512-10. 18,378 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, num_classes),
    )


def colour_cnn_small(num_classes: int = 10) -> nn.Module:
    """For [n, 3, 32, 32]: two 5x5 convolutions of stride 2, 16 and 32 channels, 800-10. 22,058 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(800, num_classes),
    )
