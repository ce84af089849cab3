"""The interface of a task: the model, the loss, the data and the metrics that an ML engineer provides.

A task is any object with the members of `Task`; it need not inherit from it. It is installed on the server, which makes
the first model and evaluates, and on every device, which trains. Both configurations name it `module:attribute`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn import functional

from fl_tasks.data.examples import Examples
from fl_tasks.data.forms import TaskData
from fl_tasks.data.shard import Shard
from fl_tasks.errors import TaskError, task_code

__all__ = ["Examples", "Shard", "Task", "TaskError", "task_code"]


@runtime_checkable
class Task(Protocol):
    """One learning problem. A metric of `metrics` is averaged over examples, so it has one value for each example.

    A task may have more members. `declared_metrics` is a sequence of `fl_tasks.Metric`: the directions of metrics, and
    metrics that are no mean over examples. `forward(model, batch)` returns the output for batches that are not
    (inputs, targets); see `fl_tasks.data.forms.forward_of`. `example_inputs()` returns the arguments of the model
    for a few examples, as a tensor, a tuple or a dict, from which an export makes an ONNX graph.
    `held_out` is a line of text that describes `eval_data(None)`; it is shown with results.
    `train_labels()` returns the class numbers [M] of the whole
    training set, for partitions by class; `train_data(Shard())` would need the memory of all inputs and may lack a
    held-out part. `train_groups()` returns the group number [M] of each example's writer, person or speaker, for
    partitioning by group. `train_size()` returns M; it is needed only where M follows from none of these.
    `train(model, data, context)` is a training loop of its own (`fl_tasks.own_loop`). `classes` is a list of the names
    of the classes, in the order of their numbers; labels are then checked when data is loaded
    (`fl_tasks.data.labels`).
    """

    version: str
    """The author increases it when clients with older code must no longer take part."""

    def model(self) -> nn.Module:
        """A new model; its initial values come from torch's default generator, which the caller seeds."""
        ...

    def loss(self, output: Any, target: Any) -> Tensor:
        """Mean loss of a batch, a scalar to differentiate. target: targets of a pair, otherwise the whole batch."""
        ...

    def train_data(self, shard: Shard) -> TaskData:
        """The training examples of a shard."""
        ...

    def eval_data(self, shard: Shard | None = None) -> TaskData | None:
        """Held-out examples: the server's for None, else the shard's own part, empty or None if it has none."""
        ...

    def metrics(self, output: Any, target: Any) -> Mapping[str, Tensor]:
        """Values by name, one for each example of the batch, shape [batch]: {"loss": ..., "accuracy": ...}."""
        ...


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
