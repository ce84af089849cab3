"""A base class with the loss and the metrics of a plain classifier. A subclass adds model and data."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional


class Classifier:
    """Cross entropy over classes. A subclass adds `model`, `train_data` and `eval_data`, and sets `version`.

    Output is [batch, classes, ...] scores, target [batch, ...] class numbers; further axes (pixels, characters) are
    averaged within each example.
    """

    version: str = "1"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross entropy of the batch."""
        return functional.cross_entropy(output, target)

    def metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        """Cross entropy, and 1 for a correct class or 0, each of shape [batch]."""
        loss = functional.cross_entropy(output, target, reduction="none")
        correct = (output.argmax(dim=1) == target).to(loss.dtype)
        return {"loss": _each(loss), "accuracy": _each(correct)}


def _each(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).mean(dim=1)
