"""Precision of the state: float32 where the model's parameters are bfloat16 or float16.

Such a parameter has 8 or 11 significant bits, so a small movement added to it is lost: 1 + 0.001 is 1 in bfloat16. So
the server keeps x and its memory in float32, the master, and clients keep their states in float32. Clients receive x
and the direction rounded to the model's dtypes. In local training y is in float32 too, and the model holds y rounded:
loss and gradients are computed in the model's dtypes. The delta, y minus the x that was sent, is rounded to the model's
dtypes and sent, and the server adds it to the master. So what rounding takes from a sent x stays in the server's x.

For parameters of float32 and float64 nothing here changes or copies a tensor.

A forward pass in float16, whose smallest numbers are larger than many gradients, has a scaled loss: it is multiplied by
a power of two before the backward pass, and the gradients are divided by it. torch's GradScaler chooses the scale: half
of it after an overflow, twice as much after 2000 passes without one. Where it leaves out a step, the caller repeats the
batch with the smaller scale, so that a round has the number of steps that it was assigned. The scale starts anew in
each round, so that a round's result depends on its assignment alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

LOW = (torch.bfloat16, torch.float16)
"""Dtypes of too few bits to add small movements in."""

_Tensors = dict[str, torch.Tensor]


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a state for a parameter of this dtype."""
    return torch.float32 if dtype in LOW else dtype


def low_dtypes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.dtype]:
    """The dtypes of the tensors of a low precision, by name."""
    return {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype in LOW}


def widened(tensors: Mapping[str, torch.Tensor]) -> _Tensors:
    """The tensors, those of a low precision in float32. The others are not copied."""
    return {name: tensor.to(master_dtype(tensor.dtype)) for name, tensor in tensors.items()}


def rounded(tensors: _Tensors, dtypes: Mapping[str, torch.dtype]) -> _Tensors:
    """The tensors, those named in `dtypes` in that dtype. Without any it is the argument itself."""
    if not dtypes:
        return tensors
    return {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in tensors.items()}


def rounded_like(model: Mapping[str, torch.Tensor], tensors: _Tensors) -> _Tensors:
    """The tensors, those of a master in the dtypes of the model. Any other dtype stays, also a wrong one."""
    low = low_dtypes(model)
    return rounded(tensors, {name: low[name] for name in low if _is_master(tensors.get(name))})


def _is_master(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.dtype == torch.float32


SMALLEST = 1.0
"""With this scale the gradients are those without scaling. If they are not finite, a smaller one does not help."""


class LossScale:
    """The scale of the loss of one round."""

    def __init__(self, parameters: list[Tensor], device: torch.device) -> None:
        """parameters: with their gradients; device: theirs."""
        self._scaler = torch.amp.GradScaler(device.type)
        # GradScaler finds the gradients through an optimizer. This one makes no step.
        self._holder = torch.optim.SGD(parameters, lr=0.0)

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
