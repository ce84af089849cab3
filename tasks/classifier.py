"""The loss and the metrics that every plain classifier has, to inherit: model and data are left to write."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional


class Classifier:
    """Cross entropy over classes. A subclass adds `model`, `train_data` and `eval_data`, and raises `version` in time.

    Output is [batch, classes, ...] scores, target [batch, ...] class numbers; further axes (pixels, characters) are
    averaged within each example.
    """

    version: str = "1"

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Mean cross entropy of the batch."""
        return functional.cross_entropy(output, target)

    def metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        """Cross entropy and 0 or 1 for a wrong or right class, each of shape [batch]."""
        loss = functional.cross_entropy(output, target, reduction="none")
        right = (output.argmax(dim=1) == target).to(loss.dtype)
        return {"loss": _each(loss), "accuracy": _each(right)}


def _each(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1).mean(dim=1)
