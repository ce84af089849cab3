"""A task with this device's data: the task's code, its fingerprint, and the examples of the shard, loaded once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import structlog
import torch

from algorithms.outside_code import place_of_thread
from fl_client.errors import ConfigError
from fl_client.settings.config import ClientConfig
from fl_client.settings.served_tasks import ServedTask, ShardConfig
from fl_client.training.methods import Methods, load_methods
from fl_common.units import counted
from fl_tasks.base import Task
from fl_tasks.data.forms import Data, as_data
from fl_tasks.data.labels import numbered
from fl_tasks.data.shard import Shard, checked_shard
from fl_tasks.errors import TaskError, task_call, task_code
from fl_tasks.loading import fingerprint, load_function, load_task
from fl_tasks.own_loop import own_loop
from fl_tasks.partitioning.file import load_indices, load_partition
from fl_tasks.partitioning.partition import partition_task, training_size
from fl_tasks.partitioning.spec import PartitionSpec
from protos.fl.v1 import coordinator_pb2, tensor_pb2, training_pb2
from protos.wire import filled

log = structlog.get_logger()

FIRST_S = 30.0
"""Seconds until the first line; each further one comes after twice the time."""


@contextmanager
def slow_start_logged(task: str) -> Iterator[None]:
    """Log now and then in which line the task's code is, while this thread imports it and loads its data."""
    done, thread = threading.Event(), threading.get_ident()

    def report() -> None:
        waited, wait = 0.0, FIRST_S
        while not done.wait(wait):
            waited, wait = waited + wait, 2 * wait
            log.warning(
                "task_still_loading",
                task=task,
                seconds=round(waited),
                place=place_of_thread(thread) or "not in its code",
                todo="if this line stays the same, the task's code does not end: end the daemon and correct it",
            )

    threading.Thread(target=report, name="slow_start", daemon=True).start()
    try:
        yield
    finally:
        done.set()


CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LocalTask:
    """A task with this device's data on the training device."""

    name: str
    task: Task
    fingerprint: training_pb2.TaskFingerprint
    train: Data
    held_out: Data
    device: torch.device = CPU
    """The training device: of the model, and of all batches."""
    methods: Methods = field(default_factory=dict)
    """Methods from outside that this device can train with."""
    frozen: tensor_pb2.Resource | None = None
    """The frozen parameters that the task gives its model. None: there are none, or they are not computed."""
    data: str = ""
    """Name of the data, where the device serves several tasks."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the data, beside those of the device."""
    package: str = ""
    """Digest of the package that has the task's code; empty if it is installed."""

    @property
    def title(self) -> str:
        """Task and data for messages."""
        return f"{self.name}@{self.data}" if self.data else self.name

    def offer(self) -> coordinator_pb2.TaskOffer:
        """The task as a registration offers it."""
        return filled(
            coordinator_pb2.TaskOffer,
            self,
            train_examples=len(self.train),
            eval_examples=len(self.held_out),
            train_batches=self.train.own_batches,
        )


class ShardKeeper(Protocol):
    """Keeps a device's shard: the state directory, or a read-only view of it."""

    def shard(
        self, configured: dict[str, Any], make: Callable[[], list[int] | None], title: str = ""
    ) -> list[int] | None:
        """See `StateDir.shard`."""
        ...


def load_local_task(config: ClientConfig, state: ShardKeeper, device: torch.device, number: int = 0) -> LocalTask:
    """Load a configured task and its data. number: of the task in the settings, from 0.

    Raises:
        ConfigError: with the task's error.
        StateError: the state directory has another shard for it.
    """
    served = config.served[number]
    try:
        task = load_task(served.name, served.options)
        version, source = fingerprint(task)
        own_loop(task)  # one with other arguments is refused
        shard = _shard(served, state, task, served.title if config.tasks else "")
        train, held_out = local_data(task, shard, device)
        if not len(train):
            raise TaskError("expected at least one training example in this device's shard, got none")
    except TaskError as error:
        raise ConfigError(f"task {served.title}: {error}") from error
    return LocalTask(
        served.name,
        task,
        training_pb2.TaskFingerprint(version=version, source=source),
        train,
        held_out,
        device,
        load_methods(config.algorithms),
        data=served.data,
        labels=served.labels,
    )


def local_data(task: Task, shard: Shard, device: torch.device) -> tuple[Data, Data]:
    """The training data of a shard, and its held-out part, for a device. Raises TaskError."""
    with task_call("the task's train_data()"):
        train = as_data(task.train_data(shard))
    train = numbered(task, train, "the training data of this shard").to(device)
    with task_call("the task's eval_data()"):
        held_out = as_data(task.eval_data(shard))
    return train, numbered(task, held_out, "the held-out data of this shard").to(device)


def _shard(served: ServedTask, state: ShardKeeper, task: Task, title: str) -> Shard:
    """This device's shard, as it was made on the first start. Later changes of the partition's code have no effect."""
    if served.shard.query is not None:
        function = load_function(served.shard.query)
        with task_code(f"the query {served.shard.query}"):  # it may return another shard at each start
            return checked_shard(function())
    configured = {"task": served.name, **served.shard.model_dump(mode="json", exclude_none=True)}

    def make() -> list[int] | None:
        indices = _indices(served.shard, task)
        with task_call("the task's train_data()"):
            task.train_data(_shard_of(indices, served.shard))  # a shard that cannot be loaded is not saved
        return indices

    return _shard_of(state.shard(configured, make, title), served.shard)


def _shard_of(indices: list[int] | None, shard: ShardConfig) -> Shard:
    return Shard(None if indices is None else torch.tensor(indices, dtype=torch.int64), shard.folder)


def _indices(shard: ShardConfig, task: Task) -> list[int] | None:
    if shard.indices is not None:
        return load_indices(shard.indices, training_size(task)).tolist()
    if shard.index is None:
        return None
    if shard.partition is not None:
        parts = partition_task(_partition_spec(shard.partition), task)
    else:
        parts = load_partition(shard.file or Path(), training_size(task)).parts
    if shard.index >= len(parts):
        raise ConfigError(
            f"shard.index: expected 0 to {len(parts) - 1} of {counted(len(parts), 'client')}, got {shard.index}"
        )
    return [int(index) for index in parts[shard.index]]


def _partition_spec(given: dict[str, Any]) -> PartitionSpec:
    needed = {"method"} if given.get("method") == "natural" else {"method", "clients"}
    known = [field.name for field in fields(PartitionSpec)]
    if not needed <= given.keys() <= set(known):
        raise ConfigError(
            f'shard.partition: expected method and clients ("natural" may be without clients), and optionally'
            f" {', '.join(known[2:])}, got {', '.join(given) or 'nothing'}"
        )
    try:
        return PartitionSpec(**given)
    except TaskError as error:
        raise ConfigError(f"shard.partition: {error}") from None
