"""All clients of a simulated run: one data set in memory, and each client's part of it cut out when it works."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from algorithms import build
from fl_client.data import LocalTask
from fl_ops.simulate.settings import Plan, SimulationSection
from fl_server.run_config import RunConfig
from protos.fl.v1.training_pb2 import TaskFingerprint
from tasks import (
    Examples,
    Shard,
    Task,
    TaskError,
    fingerprint,
    load_task,
    make_partition,
    training_groups,
    training_labels,
)

ALL = Shard()


class Clients(Mapping[str, LocalTask]):
    """Clients by id, in the order of the partition.

    Where a task's shard is nothing but the examples that its indices name, parts are cut from one set in memory each
    time they are asked for; where a task does more (it holds a part of each shard out), each is loaded once and kept.
    """

    def __init__(self, name: str, task: Task, parts: Mapping[str, Tensor]) -> None:
        self.task = task
        self._name = name
        self._parts = dict(parts)
        version, source = fingerprint(task)
        self._fingerprint = TaskFingerprint(version=version, source=source)
        self._kept: dict[str, LocalTask] = {}
        self._whole = _plain_whole(task, next(iter(self._parts.values())))

    def __getitem__(self, client: str) -> LocalTask:
        if client in self._kept:
            return self._kept[client]
        indices = self._parts[client]
        if self._whole is not None:
            return self._local(self._whole[indices], self._whole[:0])
        local = self._local(self.task.train_data(Shard(indices)), self.task.eval_data(Shard(indices)))
        self._kept[client] = local
        return local

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def num_examples(self) -> int:
        """Training examples of all clients together."""
        if self._whole is not None:
            return sum(map(len, self._parts.values()))
        return sum(len(self[client].train) for client in self)

    def _local(self, train: Examples, held_out: Examples) -> LocalTask:
        if not len(train):
            raise TaskError("expected at least one training example for each client, got none: deal to fewer clients")
        return LocalTask(self._name, self.task, self._fingerprint, train, held_out)


def _plain_whole(task: Task, part: Tensor) -> Examples | None:
    """The whole training set, if shards of the task are cut from it as they are: seen at one of them."""
    shard = Shard(part)
    if len(task.eval_data(shard)):
        return None
    whole, one = task.train_data(ALL), task.train_data(shard)
    cut = whole[part] if len(part) and int(part.max()) < len(whole) else whole[:0]
    same = len(cut) == len(one) and torch.equal(cut.inputs, one.inputs) and torch.equal(cut.targets, one.targets)
    return whole if same else None


@dataclass(frozen=True, slots=True)
class Dealt:
    """A run that can be simulated."""

    config: RunConfig
    """With the population filled in."""
    clients: Clients
    evaluated: Task
    """What the server makes the first model of, and evaluates by."""


def deal(plan: Plan, seed: int) -> Dealt:
    """The run of a plan under a seed, with its clients. Raises TaskError and AlgorithmError."""
    config, section = plan.config.model_copy(update={"seed": seed}), plan.simulation
    task = load_task(config.task.name, config.task.options)
    labels = training_labels(task)
    kept_out = _kept_out(labels, section.validation_every)
    dealt = (~kept_out).nonzero().flatten()
    groups = training_groups(task)
    groups = None if groups is None else groups[dealt]
    parts = make_partition(section.partition_spec(seed), labels[dealt], groups)
    clients = Clients(config.task.name, task, {section.name(index): dealt[part] for index, part in enumerate(parts)})
    evaluated: Any = Validated(task, kept_out.nonzero().flatten()) if section.validation_every else task
    return Dealt(_with_population(config, section, clients), clients, evaluated)


def _kept_out(labels: Tensor, every: int) -> Tensor:
    """A mask of one in `every` examples of each class; of none for 0."""
    mask = torch.zeros(len(labels), dtype=torch.bool)
    if every:
        mask[labels.argsort(stable=True)[::every]] = True
    return mask


def _with_population(config: RunConfig, section: SimulationSection, clients: Clients) -> RunConfig:
    """What a run's file may leave out here, for the simulation knows it: N, and the sum of n_i."""
    algorithm = build(config.algorithm.name, **config.algorithm.parameters)
    by_examples = algorithm.objective == "examples"
    found: dict[str, int] = {}
    if (algorithm.needs_population or by_examples) and not config.population:
        found["population"] = section.clients
    if by_examples and not config.population_examples:
        found["population_examples"] = clients.num_examples
    return config.model_copy(update=found)


class Validated:
    """A task whose server evaluates on examples of the training set that no client holds."""

    def __init__(self, task: Task, indices: Tensor) -> None:
        self._task = task
        self._indices = indices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def eval_data(self, shard: Shard | None = None) -> Examples:
        """The validation examples for the server; a client's own part as ever."""
        if shard is not None:
            return self._task.eval_data(shard)
        examples = self._task.train_data(Shard(self._indices))
        return Examples(examples.inputs, examples.targets)
