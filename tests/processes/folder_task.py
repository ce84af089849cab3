"""A task whose devices have files: rows of numbers in the folder of each device, which no other process reads."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from fl_tasks import Classifier, Examples, Shard


class Files(Classifier):
    """Two classes by the sign of a sum. The folder of a device has rows.txt with four numbers a line."""

    def __init__(self, hold: str = "") -> None:
        """hold: unused; every daemon of a test has this option."""

    def model(self) -> nn.Module:
        """Ten numbers."""
        return nn.Linear(4, 2)

    def train_data(self, shard: Shard) -> Examples:
        """The rows of the device's folder."""
        return _examples(str(shard.folder / "rows.txt"))  # type: ignore[operator]

    def eval_data(self, shard: Shard | None = None) -> Examples:
        """Rows of a formula for the coordinator; none of a device."""
        rows = torch.linspace(-1, 1, 80).reshape(20, 4)
        return Examples(rows, (rows.sum(dim=1) > 0).long())[: 0 if shard else 20]


def _examples(path: str) -> Examples:
    rows = torch.tensor([[float(word) for word in line.split()] for line in Path(path).read_text().splitlines()])
    return Examples(rows, (rows.sum(dim=1) > 0).long())
