"""Partitions the task's data for the daemons and checks task and algorithms before the training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_ops.demo.settings import DIRICHLET_ALPHA, DemoSettings
from fl_ops.errors import UsageError

METRIC = "accuracy"


@dataclass(frozen=True)
class PartitionedData:
    """Facts on the data. classes: for each client, its number of examples of each class."""

    held_out: str
    evaluation_examples: int
    classes: tuple[tuple[int, ...], ...]


def partition(settings: DemoSettings, path: Path) -> PartitionedData:
    """Write the partition to `path`. Raises UsageError for an unusable task, algorithm or number of clients."""
    # Imported here: torch takes seconds to load, and the coordinator starts in the meantime.
    import algorithms
    from tasks import Partition, PartitionSpec, TaskError, load_task, make_partition, save_partition, training_labels

    _check_algorithms(settings.algorithms, algorithms.names())
    try:
        task = load_task(settings.task, settings.options)
        labels = training_labels(task)
        spec = PartitionSpec("dirichlet", settings.clients, settings.seed, DIRICHLET_ALPHA)
        parts = make_partition(spec, labels)
        save_partition(path, Partition(spec, len(labels), parts))
        held_out = task.eval_data()
        metrics = task.metrics(task.model()(held_out[:2].inputs), held_out[:2].targets)
    except TaskError as exc:
        raise UsageError(f"task {settings.task}: {exc}") from exc
    except Exception as exc:  # the task is the user's code, which may raise anything
        raise UsageError(f"task {settings.task} raised {type(exc).__name__}: {exc}") from exc
    if METRIC not in metrics:
        raise UsageError(
            f"the demo compares by the metric {METRIC!r}, and task {settings.task} has {', '.join(metrics) or 'none'}: "
            "add it to metrics()"
        )
    numbers = labels.unique(return_inverse=True)[1]
    counts = tuple(tuple(numbers[part].bincount(minlength=int(numbers.max()) + 1).tolist()) for part in parts)
    return PartitionedData(str(getattr(task, "held_out", "")), len(held_out), counts)


def _check_algorithms(wanted: Sequence[str], known: Sequence[str]) -> None:
    from algorithms import AlgorithmError
    from extensions.methods import load_method

    for name in wanted:
        if name in known:
            continue
        try:
            load_method(name)
        except AlgorithmError as error:
            raise UsageError(f"--algorithm: {error}") from error
