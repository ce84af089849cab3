"""Scaling of the loss for a forward pass in float16, whose smallest numbers are larger than many gradients.

The loss is multiplied by a power of two before the backward pass, and the gradients are divided by it. torch's
GradScaler chooses the scale: half of it after an overflow, twice as much after 2000 passes without one. Where it leaves
out a step, the caller repeats the batch with the smaller scale, so that a round has the number of steps that it was
assigned. The scale starts anew in each round, so that a round's result depends on its assignment alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 1.0
"""With this scale the gradients are those without scaling. If they are not finite, a smaller one does not help."""


class LossScale:
    """The scale of the loss of one round."""

    def __init__(self, parameters: list[Tensor], device: torch.device) -> None:
        """parameters: with their gradients; device: theirs."""
        self._scaler = torch.amp.GradScaler(device.type)
        # GradScaler finds the gradients through an optimizer. This one makes no step.
        self._holder = torch.optim.SGD(parameters, lr=0.0)
        self._any = any(parameter.numel() for parameter in parameters)

    def backward(self, value: Tensor, *, retain_graph: bool = False) -> None:
        """Backward pass of the scaled loss."""
        self._scaler.scale(value).backward(retain_graph=retain_graph)

    def unscale(self) -> bool:
        """Divide the gradients by the scale, once after all backward passes of a batch.

        Returns False if they had overflowed: the scale is smaller now, and the batch is to be repeated.
        """
        if all(parameter.grad is None for parameter in self._holder.param_groups[0]["params"]):
            return True
        self._scaler.unscale_(self._holder)
        before = self._scaler.get_scale()
        self._scaler.update()
        return before <= SMALLEST or self._scaler.get_scale() >= before
