"""One step of training as a trial: does the task's model train on this data, and can what it becomes be sent?"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from algorithms.batches import examples_of, to_device
from fl_client.training.local_model import layouts_of
from fl_tasks.base import Task
from fl_tasks.batches import batches
from fl_tasks.data.forms import Data, forward_of
from fl_tasks.errors import TaskError
from protos.codec import LayoutError
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_MODEL

_BATCH = 8


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of the trial step."""

    model_bytes: int
    """The size of all values of the model."""
    examples: int
    """The number of examples in the batch."""
    seconds: float
    loss: float


def trial_step(task: Task, data: Data, model: nn.Module, device: torch.device) -> Trial:
    """Train on one batch, without a step of an optimizer. The model is changed.

    model: on the device. Raises TaskError for a model that cannot be sent or changes its layout, and whatever the
    task's code raises.
    """
    try:
        before = layouts_of(model)
        began = time.monotonic()
        batch = to_device(next(batches(data, min(_BATCH, len(data)), seed=0, steps=1)), device)
        loss = task.loss(*forward_of(task)(model, batch))
        loss.backward()
        value, seconds = loss.item(), time.monotonic() - began
        after = layouts_of(model)
    except LayoutError as error:
        raise TaskError(f"the task's model cannot be sent: {error}") from error
    if changed := before[RESOURCE_KIND_MODEL].difference(after[RESOURCE_KIND_MODEL]):
        raise TaskError(
            f"the model changes in training: {changed}; parameters and buffers keep their shapes and types: keep what"
            " must change in a buffer with persistent=False"
        )
    size = sum(tensor.nbytes for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor))
    return Trial(size, examples_of(batch), seconds, value)
