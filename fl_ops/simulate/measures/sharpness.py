"""The sharpness of a model on a sample of the clients' training examples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

import torch
from torch import nn

from algorithms.batches import Batch, examples_of, to_device
from algorithms.sharpness import MeanLoss
from fl_client.training.data import LocalTask
from fl_ops.simulate.clients import SimulatedClients
from fl_ops.simulate.measures.section import SharpnessSection
from fl_tasks import Task, TaskError
from fl_tasks.base import task_code
from fl_tasks.batches import ordered_batches
from fl_tasks.data.batched import Batched
from fl_tasks.data.forms import Data, forward_of
from fl_tasks.evaluation import batch_size_on
from fl_tasks.new_model import new_model


class SampledLoss:
    """The mean loss over a sample of the clients' training examples, which are read once."""

    def __init__(
        self, section: SharpnessSection, task: Task, clients: Mapping[str, LocalTask], device: torch.device
    ) -> None:
        """device: of the model and the examples. Raises TaskError for data that cannot be sampled."""
        self._task, self._device = task, device
        self.batches = list(_chunks(sampled(clients, section.examples, section.seed), device))
        """The sample, on the device."""

    @property
    def examples(self) -> int:
        """Size of the sample."""
        return sum(examples_of(batch) for batch in self.batches)

    def of(self, load: Callable[[nn.Module], object]) -> MeanLoss:
        """The loss of a model. load: gives a new model its values. Raises TaskError."""
        with torch.random.fork_rng(devices=[]):
            model = new_model(self._task)
        load(model)
        return MeanLoss(model.to(self._device), self._task.loss, self.batches, forward_of(self._task))


def _chunks(parts: Iterator[Data], device: torch.device) -> Iterator[Batch]:
    for part in parts:
        for batch in ordered_batches(part, batch_size_on(device)):
            yield to_device(batch, device)


def sampled(clients: Mapping[str, LocalTask], count: int, seed: int) -> Iterator[Data]:
    """Training examples of all clients, each equally likely, without augmentation; all if there are fewer.

    The sample of clients that share one set does not depend on their partition, but for examples that no client has.
    Raises TaskError for batches of the task's own.
    """
    generator = torch.Generator().manual_seed(seed)
    if isinstance(clients, SimulatedClients) and clients.whole is not None:
        rows = torch.cat([clients.rows(client) for client in clients]).unique()
        yield clients.whole[rows[_drawn(len(rows), count, generator)]]
        return
    ends = list(accumulate(len(local.train) for local in clients.values()))
    places: dict[int, list[int]] = {}
    for place in _drawn(ends[-1], count, generator).tolist():
        places.setdefault(bisect_right(ends, place), []).append(place)
    for number, client in enumerate(clients):
        if number in places:
            data = clients[client].train
            if isinstance(data, Batched):
                raise TaskError(
                    "sharpness: expected training examples that can be drawn one by one, got batches of the task's own"
                )
            yield data[torch.tensor(places[number]) - (ends[number - 1] if number else 0)]


def _drawn(size: int, count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randperm(size, generator=generator)[:count].sort().values


def sharpness(section: SharpnessSection, loss: SampledLoss, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The measures of a model with this state_dict. Raises TaskError."""
    of_model = loss.of(lambda model: model.load_state_dict(dict(values)))
    with task_code("the task's model or loss, differentiated twice"):
        return section.measure(of_model)
