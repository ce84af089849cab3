"""The plain convolutional networks of the papers for CIFAR."""

from __future__ import annotations

from torch import nn

from fl_tasks.models.crop import CentreCrop


def lenet(num_classes: int = 10) -> nn.Module:
    """For [n, 3, 32, 32]: the LeNet-like net of FedDyn (Acar et al., ICLR 2021). 797,962 parameters for 10 classes."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1600, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, num_classes),
    )


def tutorial_cnn(num_classes: int = 10) -> nn.Module:
    """For [n, 3, 24, 24]: TensorFlow's CIFAR tutorial net, of McMahan et al. (2017) and Hsu et al. (2019).

    1,068,298 parameters for 10 classes. Larger images are cropped to the centre. Convolutions are padded to keep the
    size. Pools of 3 with stride 2 extend over the far edge, 24 -> 12 -> 6, as TensorFlow's do. The response norm has
    the tutorial's constants: 9 channels, (1 + 0.001/9 * sum of squares) ** 0.75.
    """
    return nn.Sequential(
        CentreCrop(24),
        nn.Conv2d(3, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0),
        nn.Conv2d(64, 64, 5, padding=2),
        nn.ReLU(),
        nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(2304, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, num_classes),
    )
