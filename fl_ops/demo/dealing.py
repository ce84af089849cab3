"""The task's data dealt to the daemons, once, as a file; what cannot work is said before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fl_ops.demo.settings import DIRICHLET_ALPHA, DemoSettings
from fl_ops.errors import Misused

METRIC = "accuracy"


@dataclass(frozen=True)
class Dealt:
    """What is known of the data. classes: how many examples of each class a client holds, clients down."""

    held_out: str
    evaluation_examples: int
    classes: tuple[tuple[int, ...], ...]


def check_installed(command: str = "fl demo") -> None:
    """Raises Misused when the picture could not be drawn at the end."""
    if find_spec("matplotlib") is None:
        raise Misused(f"{command} draws with matplotlib, which is not installed: pip install impetus-fl[demo]")


def deal(settings: DemoSettings, path: Path) -> Dealt:
    """Writes the partition to `path`. Raises Misused for a task, algorithm or number of clients that cannot be."""
    # Here and not above: torch takes seconds, which the coordinator's start can use too.
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
        raise Misused(f"task {settings.task}: {exc}") from exc
    except Exception as exc:
        raise Misused(f"task {settings.task} raised {type(exc).__name__}: {exc}") from exc
    if METRIC not in metrics:
        raise Misused(
            f"the demo compares by the metric {METRIC!r}, and task {settings.task} has {', '.join(metrics) or 'none'}: "
            "let metrics() give it too"
        )
    numbers = labels.unique(return_inverse=True)[1]
    counts = tuple(tuple(numbers[part].bincount(minlength=int(numbers.max()) + 1).tolist()) for part in parts)
    return Dealt(str(getattr(task, "held_out", "")), len(held_out), counts)


def _check_algorithms(wanted: Sequence[str], known: Sequence[str]) -> None:
    for name in wanted:
        if name not in known:
            raise Misused(f"--algorithm: expected one of {', '.join(known)}, got {name!r}")
