"""Tasks with metrics that are no mean over examples: by functions of their own, and by torchmetrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fl_tasks import Classifier, Examples, Metric, Shard

CLASSES = 3


def confusion(output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
    """Counts [class, answer]."""
    pairs = target * CLASSES + output.argmax(dim=1)
    return {"counts": pairs.bincount(minlength=CLASSES**2).reshape(CLASSES, CLASSES)}


def macro_f1(sums: Mapping[str, Tensor]) -> Tensor:
    """Mean over the classes of 2 TP / (2 TP + FP + FN); 0 for a class that nobody has or answers."""
    counts = sums["counts"]
    right, both = counts.diagonal(), counts.sum(0) + counts.sum(1)
    return torch.where(both > 0, 2 * right / both, 0.0).mean()


def recalls(sums: Mapping[str, Tensor]) -> Tensor:
    """Of each class."""
    counts = sums["counts"]
    return counts.diagonal() / counts.sum(1)


def surprise(output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
    """Sum of the negative logarithms, and the number of answers."""
    return {"nll": nn.functional.cross_entropy(output, target, reduction="sum"), "count": torch.tensor(len(target))}


def perplexity(sums: Mapping[str, Tensor]) -> Tensor:
    """exp of the mean negative logarithm: NaN without an answer."""
    return (sums["nll"] / sums["count"]).exp()


class Scored(Classifier):
    """Which of three directions a point lies in, with sums. kept: examples of each shard that are held out.

    gloss: a mean metric whose direction nobody declares.
    """

    declared_metrics: tuple[Metric, ...] = (
        Metric("f1_macro", sums=confusion, value=macro_f1),
        Metric("recalls", lower_is_better=False, sums=confusion, value=recalls),
        Metric("perplexity", sums=surprise, value=perplexity),
        Metric("misses", lower_is_better=True),
    )

    def __init__(self, kept: int = 20) -> None:
        self._kept = kept

    def model(self) -> nn.Module:
        return nn.Linear(2, CLASSES)

    def _examples(self, seed: int, count: int) -> Examples:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(count, 2, generator=generator)
        return Examples(inputs, (inputs @ torch.tensor([[1.0, -1.0, 0.2], [0.3, 0.5, -1.0]])).argmax(dim=1))

    def train_data(self, shard: Shard) -> Examples:
        return shard.of(self._examples(1, 180))[self._kept :]

    def eval_data(self, shard: Shard | None = None) -> Examples:
        if shard is None:
            return self._examples(2, 101)
        return shard.of(self._examples(1, 180))[: self._kept]

    def metrics(self, output: Any, target: Any) -> Mapping[str, Tensor]:
        found = dict(super().metrics(output, target))
        return {**found, "misses": 1 - found["accuracy"], "gloss": -found["loss"]}
