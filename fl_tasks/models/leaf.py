"""The networks of LEAF (Caldas et al., 2018), used in the federated Demon experiments."""

from __future__ import annotations

from torch import nn


def femnist_cnn(num_classes: int = 62, units: int = 2048) -> nn.Module:
    """For [n, 1, 28, 28]: characters by writer, two padded 5x5 convolutions, each pooled, 3136-units-classes.

    6,603,710 parameters for 62 classes. The Demon paper prints 2,028 units (6,539,730 parameters), probably a misprint.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, units),
        nn.ReLU(),
        nn.Linear(units, num_classes),
    )


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
