"""A task of points on a line."""

from __future__ import annotations

import torch
from torch import nn

from fl_tasks import Classifier, Examples, Shard


class Tiny(Classifier):
    """Points on a line, classified by their sign."""

    def __init__(self, n: int = 12) -> None:
        inputs = torch.linspace(-1, 1, n).unsqueeze(1)
        self.examples = Examples(inputs, (inputs[:, 0] > 0).long())

    def model(self) -> nn.Module:
        """Two parameters per class."""
        return nn.Linear(1, 2)

    def train_data(self, shard: Shard) -> Examples:
        """All points, or those of the shard."""
        return shard.of(self.examples)

    def eval_data(self, shard: Shard | None = None) -> Examples:
        """The points again."""
        return self.examples
