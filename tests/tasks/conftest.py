"""What the task tests share: one torch thread, a tiny task, and the real data sets where they are installed."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tasks import Classifier, Examples, Shard


class Tiny(Classifier):
    """Points on a line, told apart by their sign."""

    def __init__(self, n: int = 12) -> None:
        inputs = torch.linspace(-1, 1, n).unsqueeze(1)
        self.examples = Examples(inputs, (inputs[:, 0] > 0).long())

    def model(self) -> nn.Module:
        """Two parameters a class."""
        return nn.Linear(1, 2)

    def train_data(self, shard: Shard) -> Examples:
        """All points, or those of the shard."""
        return shard.of(self.examples)

    def eval_data(self, shard: Shard | None = None) -> Examples:
        """The points again."""
        return self.examples


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tiny() -> Tiny:
    """A task of twelve points."""
    return Tiny()


@pytest.fixture
def labels() -> Tensor:
    """1,000 class numbers, 100 of each of ten classes, in a mixed order."""
    return torch.arange(1000) * 7 % 10


@pytest.fixture
def data_root() -> str:
    """The torchvision folder with real data sets; without one the test is skipped."""
    root = Path(os.environ.get("IMPETUS_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
    if not (root / "FashionMNIST").exists() or not (root / "cifar-10-batches-py").exists():
        pytest.skip(f"no data sets in {root}: set IMPETUS_DATA to a torchvision folder with FashionMNIST and CIFAR-10")
    return str(root)
