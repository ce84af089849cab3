"""The forms of data that a task may return, and the model's forward pass for batches of any structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from algorithms.batches import Batch, Forward, is_pair
from algorithms.outside_code import described
from fl_tasks.data.batched import Batched
from fl_tasks.data.examples import Examples
from fl_tasks.data.samples import MapStyle, Samples
from fl_tasks.errors import TaskError

Data = Examples | Samples | Batched
"""The data of a device or of the server."""

TaskData = Data | MapStyle
"""What `train_data` and `eval_data` return. A map-style data set stands for Samples(dataset)."""


def as_data(returned: TaskData | None) -> Data:
    """What a task returned, in one of three forms; None is no example. Raises TaskError for anything else."""
    if isinstance(returned, Examples | Samples | Batched):
        return returned
    return Samples([] if returned is None else returned)


def forward_of(task: object) -> Forward:
    """The forward pass of a task's batches.

    With a method `forward(model, batch)` of the task, its result is the output, and loss and metrics get the whole
    batch. Without it, a pair of tensors is (inputs, targets): loss and metrics get model(inputs) and the targets. A
    dict is passed to the model as keyword arguments, a tuple or list as positional ones, another batch as the only
    argument, and loss and metrics get the whole batch.
    """
    own = getattr(task, "forward", None)
    if not callable(own):
        return forward
    return lambda model, batch: (own(model, batch), batch)


def forward(model: nn.Module, batch: Batch) -> tuple[Any, Any]:
    """See `forward_of`: the rule for tasks without a method `forward`."""
    if is_pair(batch):
        inputs, targets = batch
        return model(inputs), targets
    if isinstance(batch, Mapping):
        return model(**batch), batch
    if isinstance(batch, tuple | list) and not callable(getattr(batch, "to", None)):
        return _all_parts(model, batch), batch
    return model(batch), batch


def _all_parts(model: nn.Module, batch: Sequence[Any]) -> Any:
    """The output for a batch that is no pair of tensors. Raises TaskError if the model does not take its parts."""
    try:
        return model(*batch)
    except TypeError as error:
        kinds = ", ".join(type(part).__name__ for part in batch[:_SHOWN])
        raise TaskError(
            f"the model got all {len(batch)} parts of a batch, of the types {kinds}, and raised {described(error)}:"
            " expected a pair of tensors (inputs, targets), with labels as numbers and not as text; or give the task a"
            " method forward(model, batch)"
        ) from error


_SHOWN = 5
"""Parts of a batch whose types are named."""
