"""A task for trying things out: which of two rings a point lies on. The data comes from a formula."""

from __future__ import annotations

import math

import torch
from torch import nn

from fl_tasks import Classifier, Examples, Shard

TRAIN, HELD_OUT = 240, 80


class Rings(Classifier):
    """Two rings with radii 1 and 2. hidden: width of the two hidden layers."""

    version = "1"

    def __init__(self, hidden: int = 8) -> None:
        self.hidden = int(hidden)

    def model(self) -> nn.Module:
        """Three layers."""
        return nn.Sequential(
            nn.Linear(2, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, self.hidden),
            nn.ReLU(),
            nn.Linear(self.hidden, 2),
        )

    def train_data(self, shard: Shard) -> Examples:
        """The points of a shard: it is indices into the first 240."""
        return shard.of(points(0, TRAIN))

    def eval_data(self, shard: Shard | None = None) -> Examples:
        """80 other points for the server, and none for a device."""
        held_out = points(TRAIN, HELD_OUT)
        return held_out if shard is None else held_out[:0]


def points(first: int, count: int) -> Examples:
    """Points at angles that fill the rings evenly, with a small distance from their radius."""
    number = torch.arange(first, first + count, dtype=torch.float32)
    ring = (torch.arange(first, first + count) % 2).long()
    angle = 2.0 * math.pi * (number * 0.618034 % 1.0)
    radius = 1.0 + ring + 0.2 * torch.sin(12.9898 * number)
    return Examples(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), ring)
