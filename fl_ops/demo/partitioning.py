"""Partitions the task's data for the daemons and checks task and algorithms before the training."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fl_ops.demo.settings import DIRICHLET_ALPHA, METRIC, DemoSettings
from fl_ops.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from fl_tasks import PartitionSpec, Task
    from fl_tasks.data.forms import Data


@dataclass(frozen=True)
class PartitionedData:
    """Facts on the data."""

    held_out: str
    evaluation_examples: int
    classes: tuple[tuple[int, ...], ...]
    """The number of examples of each class for each client; one number for a task without classes."""
    method: str = "dirichlet"
    """The partition method: "natural" or "iid" for a task without classes."""


def partition(settings: DemoSettings, path: Path) -> PartitionedData:
    """Write the partition to `path`. Raises UsageError for an unusable task, algorithm or number of clients.

    It is by class, or by the task's groups, or random, whichever the task's data first allows.
    """
    # Imported here: torch takes seconds to load, and the coordinator starts in the meantime.
    import algorithms
    from algorithms.outside_code import described, is_interrupt
    from fl_tasks import Partition, TaskError, load_task, save_partition, training_size
    from fl_tasks.data.forms import as_data

    _check_algorithms(settings.algorithms, algorithms.names())
    try:
        task = load_task(settings.task, settings.options)
        spec, parts, labels = _parts(settings, task)
        save_partition(path, Partition(spec, training_size(task), parts))
        held_out = as_data(task.eval_data())
        metrics = _metrics(task, held_out)
    except TaskError as exc:
        raise UsageError(f"task {settings.task}: {exc}") from exc
    except BaseException as exc:  # the task is the user's code, which may raise anything
        if is_interrupt(exc):
            raise
        raise UsageError(f"task {settings.task} raised {described(exc)}") from exc
    if METRIC not in metrics:
        raise UsageError(
            f"the demo compares by the metric {METRIC!r}, and task {settings.task} has {', '.join(metrics) or 'none'}: "
            "add it to metrics()"
        )
    if labels is None:
        counts = tuple((len(part),) for part in parts)
    else:
        numbers = labels.unique(return_inverse=True)[1]
        counts = tuple(tuple(numbers[part].bincount(minlength=int(numbers.max()) + 1).tolist()) for part in parts)
    return PartitionedData(str(getattr(task, "held_out", "")), len(held_out), counts, spec.method)


def _parts(settings: DemoSettings, task: Task) -> tuple[PartitionSpec, list[Tensor], Tensor | None]:
    """The partition, and the class of each example if there are classes."""
    from fl_tasks import PartitionSpec, TaskError, make_partition, partition_task, training_groups, training_labels

    try:
        labels = training_labels(task)
    except TaskError:
        groups = training_groups(task)
        natural = groups is not None and len(groups.unique()) >= settings.clients
        spec = PartitionSpec("natural" if natural else "iid", settings.clients, settings.seed)
        return spec, partition_task(spec, task), None
    spec = PartitionSpec("dirichlet", settings.clients, settings.seed, DIRICHLET_ALPHA)
    return spec, make_partition(spec, labels), labels


def _metrics(task: Task, held_out: Data) -> Collection[str]:
    """Names of the metrics, of one small batch."""
    import torch

    from fl_tasks.batches import batches
    from fl_tasks.data.forms import forward_of
    from fl_tasks.new_model import new_model

    batch = next(batches(held_out, 2, seed=0, steps=1))
    with torch.random.fork_rng(devices=[]):
        return list(task.metrics(*forward_of(task)(new_model(task), batch)))


def _check_algorithms(wanted: Sequence[str], known: Sequence[str]) -> None:
    from algorithms import AlgorithmError
    from fl_extensions.methods import load_method

    for name in wanted:
        if name in known:
            continue
        try:
            load_method(name)
        except AlgorithmError as error:
            raise UsageError(f"--algorithm: {error}") from error
