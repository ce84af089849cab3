"""Convolutional networks: of the papers for CIFAR, of Reddi et al. and LEAF for characters and faces; small ones."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn


class CentreCrop(nn.Module):
    """[n, channels, height, width] -> [n, channels, size, size], the centre. Images of that size are unchanged.

    It is part of the network, so that every evaluation crops in the same way. In training the random crops already have
    this size.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, images: Tensor) -> Tensor:
        """Drop floor((height - size) / 2) rows at the top, and columns on the left likewise."""
        top, left = ((side - self.size) // 2 for side in images.shape[-2:])
        return images[..., top : top + self.size, left : left + self.size]


def _dense(*sizes: int) -> list[nn.Module]:
    """Flattened images, then linear layers between these sizes, with ReLU after all but the last one."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]


def _convolved(*channels: int, kernel: int, padding: int = 0) -> list[nn.Module]:
    """Convolutions between these channels, each with ReLU and a pool of 2."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(channels):
        layers += [nn.Conv2d(inputs, outputs, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
    return layers


def lenet(num_classes: int = 10) -> nn.Module:
    """The LeNet-like net of FedDyn (Acar et al., ICLR 2021) for [n, 3, 32, 32]. 797,962 parameters for 10 classes."""
    return nn.Sequential(*_convolved(3, 64, 64, kernel=5), *_dense(1600, 384, 192, num_classes))


def tutorial_cnn(num_classes: int = 10) -> nn.Module:
    """TensorFlow's CIFAR tutorial net for [n, 3, 24, 24], of McMahan et al. (2017) and Hsu et al. (2019).

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
        *_dense(2304, 384, 192, num_classes),
    )


def emnist_cnn(num_classes: int = 62) -> nn.Module:
    """The EMNIST net of Reddi et al. (ICLR 2021) and FedSAM (Qu et al., ICML 2022) for [n, 1, 28, 28], with dropout.

    1,206,590 parameters for 62 classes, 1,199,882 for 10.
    """
    convolved = nn.Conv2d(1, 32, 3), nn.ReLU(), *_convolved(32, 64, kernel=3)
    dense = nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, num_classes)
    return nn.Sequential(*convolved, nn.Dropout(0.25), nn.Flatten(), *dense)


def femnist_cnn(num_classes: int = 62, units: int = 2048) -> nn.Module:
    """For [n, 1, 28, 28]: characters by writer, two padded 5x5 convolutions, each pooled, 3136-units-classes.

    6,603,710 parameters for 62 classes. The Demon paper prints 2,028 units (6,539,730 parameters), probably a misprint.
    """
    return nn.Sequential(*_convolved(1, 32, 64, kernel=5, padding=2), *_dense(3136, units, num_classes))


def celeba_cnn(num_classes: int = 2, blocks: int = 4, batch_norm: bool = False) -> nn.Module:
    """For [n, 3, 84, 84]: faces by person; blocks of padded 3x3 convolution, pool with ceil, ReLU; one linear layer.

    30,946 parameters. LEAF has batch norms (31,202 parameters); the Demon paper omits them. Its "repeated three
    times" is read as one block and three more, as in LEAF; three blocks have 27,138. Sides: 84, 42, 21, 11, 6.
    """
    layers: list[nn.Module] = []
    side = 84
    for block in range(blocks):
        layers += [nn.Conv2d(32 if block else 3, 32, 3, padding=1), *([nn.BatchNorm2d(32)] if batch_norm else [])]
        layers += [nn.MaxPool2d(2, ceil_mode=True), nn.ReLU()]
        side = -(-side // 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * side * side, num_classes))


def digits_cnn(num_classes: int = 10) -> nn.Module:
    """For [n, 1, 8, 8]: two padded 3x3 convolutions, 16 and 32 channels, pool, 512-32-10. 21,546 parameters."""
    first = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()
    return nn.Sequential(*first, *_convolved(16, 32, kernel=3, padding=1), *_dense(512, 32, num_classes))


def grey_cnn(num_classes: int = 10) -> nn.Module:
    """For [n, 1, 28, 28]: two 5x5 convolutions, 16 and 32 channels, each pooled, 512-128-10. 80,202 parameters."""
    return nn.Sequential(*_convolved(1, 16, 32, kernel=5), *_dense(512, 128, num_classes))


def grey_cnn_small(num_classes: int = 10) -> nn.Module:
    """For [n, 1, 28, 28]: two 5x5 convolutions of stride 2, 16 and 32 channels, 512-10. 18,378 parameters."""
    return _strided(1, 512, num_classes)


def colour_cnn_small(num_classes: int = 10) -> nn.Module:
    """For [n, 3, 32, 32]: two 5x5 convolutions of stride 2, 16 and 32 channels, 800-10. 22,058 parameters."""
    return _strided(3, 800, num_classes)


def _strided(channels: int, features: int, num_classes: int) -> nn.Module:
    convolved = nn.Conv2d(channels, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 5, stride=2), nn.ReLU()
    return nn.Sequential(*convolved, *_dense(features, num_classes))
