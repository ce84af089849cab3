"""An estimate of the memory that one client of a group needs, to bound the size of groups."""

from __future__ import annotations

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from algorithms.batches import Batch, to_device
from algorithms.client import LocalData
from algorithms.model_state import trainable_views

_STACKS = 8
"""Stacks of parameters during a step: y, gradients, a second point, the terms of the rule, and their results."""
_PASSES = 2
"""The backward pass holds gradients of activations beside the saved ones."""


def bytes_of_client(model: nn.Module, data: LocalData, batch: Batch) -> int:
    """Bytes for one client's parameters, and for the activations of a batch, from one forward pass.

    data: for its loss and forward pass. torch's default generators and the model's buffers are changed.
    """
    model.train()
    device = next(model.parameters()).device
    parameters = {each.data_ptr() for each in model.parameters()}
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        # Kept until the hooks end, so that no memory is used, and counted, twice.
        loss = data.loss(*data.forward(model, to_device(batch, device)))
    del loss
    size = sum(each.numel() * max(4, each.element_size()) for each in trainable_views(model).values())
    return _STACKS * size + _PASSES * sum(saved.values())
