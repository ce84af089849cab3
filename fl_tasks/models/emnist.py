"""The network for handwritten characters of Reddi et al. and later papers."""

from __future__ import annotations

from torch import nn


def emnist_cnn(num_classes: int = 62) -> nn.Module:
    """For [n, 1, 28, 28]: the EMNIST net of Reddi et al. (ICLR 2021) and FedSAM (Qu et al., ICML 2022), with dropout.

    1,206,590 parameters for 62 classes, 1,199,882 for 10.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, num_classes),
    )
