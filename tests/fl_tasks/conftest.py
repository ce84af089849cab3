"""Fixtures of the task tests: one torch thread, a tiny task, and the real data sets where they are installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.fl_tasks.tiny import Tiny


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
