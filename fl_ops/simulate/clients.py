"""The clients of a simulated run or of a replay: their tasks and data, by client id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from algorithms import build
from fl_client.training.data import LocalTask, local_data
from fl_client.training.methods import NO_METHODS, Methods
from fl_ops.simulate.folders import Folders, folders_of
from fl_ops.simulate.settings import SimulationConfig, SimulationSection, with_code
from fl_ops.simulate.system.devices import Devices
from fl_server.run_settings.config import RunConfig
from fl_tasks import (
    Examples,
    Shard,
    Task,
    TaskError,
    fingerprint,
    load_task,
    make_partition,
    training_groups,
    training_labels,
    training_size,
)
from fl_tasks.base import task_code
from fl_tasks.data.forms import Data, TaskData, as_data
from fl_tasks.data.labels import numbered
from protos.fl.v1.training_pb2 import TaskFingerprint

ALL = Shard()
CPU = torch.device("cpu")


class Parts(Mapping[str, Tensor]):
    """Indices of each client's examples, as views of one tensor: 10,000 tensors would take longer to make and to fork.

    clients: ids; parts: the indices of each.
    """

    def __init__(self, clients: Sequence[str], parts: Sequence[Tensor]) -> None:
        ends = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
        self._indices = torch.cat([*parts])
        self._ranges = dict(zip(clients, zip([0, *ends[:-1]], ends, strict=True), strict=True))

    def __getitem__(self, client: str) -> Tensor:
        first, end = self._ranges[client]
        return self._indices[first:end]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    @property
    def num_indices(self) -> int:
        """The number of examples of all clients together."""
        return len(self._indices)


class SimulatedClients(Mapping[str, LocalTask]):
    """Clients by id, in the order of the partition.

    If a task's shard is exactly the examples that its indices select, each client's data is cut from one set in memory
    at every access. Otherwise (for example when the task withholds a part of each shard), each shard is loaded at every
    access if the task keeps its files in memory, and else loaded once and kept.
    """

    def __init__(
        self, name: str, task: Task, parts: Mapping[str, Tensor] | Folders, methods: Methods = NO_METHODS
    ) -> None:
        """parts: the indices of each client's examples, or its folder. methods: from outside; every client has them."""
        self.task = task
        self._methods = methods
        self._name = name
        self._parts: Parts | Folders = (
            parts if isinstance(parts, Parts | Folders) else Parts([*parts], [*parts.values()])
        )
        version, source = fingerprint(task)
        self._fingerprint = TaskFingerprint(version=version, source=source)
        self._loaded: dict[str, LocalTask] = {}
        self._held_out: dict[str, bool] = {}
        self._files_kept = _keep_files(task, keep=True)
        self._all_examples: Examples | None = None
        if isinstance(self._parts, Parts):
            with task_code("the task's train_data() or eval_data()"):
                self._all_examples = _examples_to_cut(task, next(iter(self._parts.values())))
        if self._all_examples is not None:
            _keep_files(task, keep=False)

    def __getitem__(self, client: str) -> LocalTask:
        if client in self._loaded:
            return self._loaded[client]
        if self._all_examples is not None:
            return self._local(self._all_examples[self.rows(client)], self._all_examples[:0])
        part = self._parts[client]
        shard = Shard(folder=part) if isinstance(part, Path) else Shard(part)
        local = self._local(*local_data(self.task, shard, CPU))
        if not self._files_kept:
            self._loaded[client] = local
        return local

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def size_of(self, client: str) -> int:
        """Number of examples that the partition or its folder gives a client."""
        return len(self._parts[client]) if isinstance(self._parts, Parts) else len(self[client].train)

    @property
    def whole(self) -> Examples | None:
        """The examples that all clients' data is cut from; None if it is loaded client by client."""
        return self._all_examples

    def rows(self, client: str) -> Tensor:
        """The indices of a client's examples in `whole`."""
        return cast(Tensor, self._parts[client])

    def has_held_out(self, client: str) -> bool:
        """Whether a client has held-out examples. Its data is loaded at most once to find out."""
        if self._all_examples is not None:
            return False
        if client not in self._held_out:
            self._held_out[client] = len(self[client].held_out) > 0
        return self._held_out[client]

    @property
    def num_examples(self) -> int:
        """Number of training examples of all clients together."""
        if self._all_examples is not None and isinstance(self._parts, Parts):
            return self._parts.num_indices
        return sum(len(self[client].train) for client in self)

    def _local(self, train: Data, held_out: Data) -> LocalTask:
        if not len(train):
            raise TaskError("expected at least one training example for each client, got none: use fewer clients")
        return LocalTask(self._name, self.task, self._fingerprint, train, held_out, methods=self._methods)


def has_held_out(clients: Mapping[str, LocalTask], client: str) -> bool:
    """Whether a client has held-out examples."""
    if isinstance(clients, SimulatedClients):
        return clients.has_held_out(client)
    return len(clients[client].held_out) > 0


def _keep_files(task: Task, *, keep: bool) -> bool:
    """Let the task keep the content of its files in memory, or forget it. Whether it has the method `keep_files`."""
    if not callable(method := getattr(task, "keep_files", None)):
        return False
    with task_code("the task's keep_files()"):
        method(keep)
    return True


def _examples_to_cut(task: Task, part: Tensor) -> Examples | None:
    """The whole training set if the task cuts shards from it unchanged, tested with one shard; otherwise None.

    Only Examples are compared. Other data is not in memory, so that a shard of it costs little.
    """
    shard = Shard(part)
    one = task.train_data(shard)
    if not isinstance(one, Examples) or len(as_data(task.eval_data(shard))):
        return None
    whole = task.train_data(ALL)
    if not isinstance(whole, Examples):
        return None
    cut = whole[part] if len(part) and int(part.max()) < len(whole) else whole[:0]
    same = len(cut) == len(one) and torch.equal(cut.inputs, one.inputs) and torch.equal(cut.targets, one.targets)
    if not same or cut.prepare != one.prepare:
        return None
    return cast(Examples, numbered(task, whole, "the training data"))


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that is ready to be simulated."""

    config: RunConfig
    """The run's configuration with seed and population set."""
    clients: SimulatedClients
    server_task: Task
    """The task that the server uses for the first model and for evaluation."""
    devices: Devices | None = None
    """The clients' devices, if the run has simulated time."""


def prepare(config: SimulationConfig, seed: int) -> PreparedRun:
    """Partition the data of a run under a seed, and load its code.

    Raises TaskError, AlgorithmError, InvalidInput, and UsageError for missing folders.
    """
    run, section = with_code(config.run.model_copy(update={"seed": seed})), config.simulation
    task = load_task(run.task.name, run.task.options)
    _keep_files(task, keep=True)  # until the clients' data is there
    parts: Parts | Folders
    if section.folders is None:
        withheld = _validation_mask(task, section.validation_every)
        parts = _parts(task, section, seed, (~withheld).nonzero().flatten())
    else:
        parts = folders_of(section)
    clients = SimulatedClients(run.task.name, task, parts, _methods(run))
    server_task: Any = ValidatedTask(task, withheld.nonzero().flatten()) if section.validation_every else task
    devices = None if section.system is None else Devices(section.system, clients, seed)
    return PreparedRun(_with_population(run, clients), clients, server_task, devices)


def _parts(task: Task, section: SimulationSection, seed: int, available: Tensor) -> Parts:
    """The partition of the available examples."""
    spec = section.partition_spec(seed)
    labels = training_labels(task)[available] if spec.reads_classes else None
    groups = training_groups(task) if spec.method == "natural" else None
    parts = make_partition(spec, labels, None if groups is None else groups[available], size=len(available))
    indices = available[torch.cat(parts)].split([len(part) for part in parts])
    return Parts([section.name(index) for index in range(len(parts))], indices)


def _methods(run: RunConfig) -> Methods:
    section = run.algorithm
    return {} if section.fingerprint is None else {section.name: TaskFingerprint(**dict(section.fingerprint))}


def _validation_mask(task: Task, every: int) -> Tensor:
    """A mask that selects one in `every` examples, of each class if there are classes; no example for 0."""
    mask = torch.zeros(training_size(task), dtype=torch.bool)
    if every:
        try:
            order = training_labels(task).argsort(stable=True)
        except TaskError:  # the task has no classes
            order = torch.arange(len(mask))
        mask[order[::every]] = True
    return mask


def _with_population(run: RunConfig, clients: SimulatedClients) -> RunConfig:
    """Fill in N and the sum of n_i where the method needs them: the simulation knows both."""
    algorithm = build(run.algorithm.name, **run.algorithm.parameters)
    by_examples = algorithm.objective == "examples"
    known: dict[str, int] = {}
    if (algorithm.needs_population or by_examples) and not run.population:
        known["population"] = len(clients)
    if by_examples and not run.population_examples:
        known["population_examples"] = clients.num_examples
    return run.model_copy(update=known)


class ValidatedTask:
    """A task that the server evaluates on training examples that no client has."""

    def __init__(self, task: Task, indices: Tensor) -> None:
        self._task = task
        self._indices = indices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def eval_data(self, shard: Shard | None = None) -> TaskData | None:
        """The validation examples for the server; for a shard, the task's own held-out data."""
        if shard is not None:
            return self._task.eval_data(shard)
        examples = self._task.train_data(Shard(self._indices))
        return replace(examples, augment=None) if isinstance(examples, Examples) else examples
