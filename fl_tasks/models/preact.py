"""Pre-activation ResNet-18, as Reddi et al. train it on CIFAR-100."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from fl_tasks.models.convolutional import CentreCrop


class PreActResNet18(nn.Module):
    """Pre-activation ResNet-18 (He et al., ECCV 2016) with group norms for [n, 3, 24, 24]; larger images are cropped.

    11,227,812 parameters for 100 classes, as many as `ResNet18(100)`. The paper (Reddi et al., ICLR 2021) states only
    that group norms replace batch norms. From its program: stem and norm before the first block, which has no norm of
    its own; a norm after each 1x1 shortcut; a last norm before the mean; eps 1e-3; feature maps of 12, 6 and then 6 in
    all stages, because the program passes no stride to its stages (`stride=2` gives the textbook's 6, 3, 2, 1, with a
    fourteenth of the arithmetic). Inferred: 2 groups, the library's default. Its L2 of 1e-4 belongs to the optimizer.
    """

    def __init__(self, num_classes: int = 100, stride: int = 1) -> None:
        super().__init__()
        self.crop = CentreCrop(24)
        self.stem = _conv(3, 64, 7, 2)
        self.stem_norm = _norm(64)
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        blocks = [PreActBlock(64, 64, 1, first=True), PreActBlock(64, 64, 1)]
        for channels in (128, 256, 512):
            blocks += [PreActBlock(channels // 2, channels, stride), PreActBlock(channels, channels, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = _norm(512)
        self.fc = nn.Linear(512, num_classes)
        nn.init.normal_(self.fc.weight, std=0.01)
        nn.init.zeros_(self.fc.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Scores [n, num_classes]."""
        x = self.pool(functional.relu(self.stem_norm(self.stem(self.crop(images)))))
        x = functional.relu(self.norm(self.blocks(x)))
        scores: Tensor = self.fc(x.mean(dim=(2, 3)))
        return scores


class PreActBlock(nn.Module):
    """Twice norm, ReLU and 3x3 convolution, plus a shortcut. The first block has no first norm and ReLU."""

    def __init__(self, channels_in: int, channels: int, stride: int, *, first: bool = False) -> None:
        super().__init__()
        self.norm1 = None if first else _norm(channels_in)
        self.conv1 = _conv(channels_in, channels, 3, stride)
        self.norm2 = _norm(channels)
        self.conv2 = _conv(channels, channels, 3, 1)
        same = stride == 1 and channels_in == channels
        self.shortcut = None if same else nn.Sequential(_conv(channels_in, channels, 1, stride), _norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        """[n, channels_in, h, w] -> [n, channels, h / stride, w / stride]."""
        residual = self.conv1(x if self.norm1 is None else functional.relu(self.norm1(x)))
        residual = self.conv2(functional.relu(self.norm2(residual)))
        shortcut = x if self.shortcut is None else self.shortcut(x)
        total: Tensor = shortcut + residual
        return total


def _conv(channels_in: int, channels: int, kernel: int, stride: int) -> nn.Conv2d:
    conv = nn.Conv2d(channels_in, channels, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_in", nonlinearity="relu")
    return conv


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(2, channels, eps=1e-3)
