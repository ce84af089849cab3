"""`fl partition`: partition a task's training data among clients, as a file for the devices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import RenderableType

from fl_common.built_in import PartitionMethod
from fl_common.command_help import FlagGroup
from fl_ops.commands import completion
from fl_ops.commands.options import Context, command
from fl_ops.errors import Refused, UsageError
from fl_ops.files import Target, check_free
from fl_ops.render import output
from fl_ops.render.fitted import FirstThatFits, FittedTable

_MAX_COLUMNS = 20
"""With more classes, only their number is shown."""


@dataclass(frozen=True)
class PartitionFlags(FlagGroup):
    """The partition. The fields are those of fl_tasks.PartitionSpec, but for its number of clients."""

    method: Annotated[
        PartitionMethod, typer.Option(help="Partition method; docs/training/tasks.md describes them.")
    ] = "dirichlet"
    alpha: Annotated[
        float,
        typer.Option(
            help="For the dirichlet methods: 0.1 gives each client few classes, 100 gives nearly equal clients."
        ),
    ] = 0.3
    prior_scaled: Annotated[
        bool, typer.Option("--prior-scaled", help="For dirichlet, dirichlet-hsu: divide alpha among the classes.")
    ] = False
    rotate: Annotated[bool, typer.Option("--rotate", help="For dirichlet-hsu: fill clients in turn.")] = False
    classes: Annotated[int, typer.Option(help="For classes: number of classes of each client.")] = 2
    min_examples: Annotated[
        int, typer.Option(help="For dirichlet-class: minimum number of examples of each client.")
    ] = 10
    stratified: Annotated[
        bool, typer.Option("--stratified", help="For iid: the same number of each class for every client.")
    ] = False
    sigma: Annotated[
        float,
        typer.Option(
            help="Lognormal sizes of clients; not for dirichlet-class and natural, which have their own sizes."
        ),
    ] = 0.0
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same partition.")] = 0


@command
def partition(
    context: Context,
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK", help="A built-in task's name, or module:attribute.", autocompletion=completion.task_names
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Path of the partition file.")],
    flags: PartitionFlags,
    clients: Annotated[
        int, typer.Option(help="Number of clients; 0, for natural only: one for each group.", show_default="0")
    ] = 0,
    data_root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the task's data set.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an older file.")] = False,
) -> None:
    """Partition a task's training data among clients. Client i then uses the file with index i."""
    check_free(
        Target(out, replace=force),
        "choose another --out, or use --force; a partition that devices already use must not change",
    )
    counts = _partition(task, data_root, {**vars(flags), "clients": clients}, out)
    facts = {"path": str(out), "num_examples": counts.num_examples, "examples": counts.sizes}
    if counts.by_client is None:
        output.show(facts, _sizes(counts.sizes), context.as_json)
    else:
        output.show({**facts, "classes": counts.by_client}, _table(counts.by_client), context.as_json)


class _Counts(NamedTuple):
    """The numbers of a partition."""

    num_examples: int
    """Size of the training set."""
    sizes: list[int]
    """Examples of each client."""
    by_client: list[list[int]] | None
    """Examples of each class, for each client. None for a task without classes."""


def _partition(task: str, data_root: Path | None, fields: dict[str, Any], out: Path) -> _Counts:
    """Write the partition for these fields of PartitionSpec. Raises UsageError and Refused."""
    # Imported here because it loads torch, which takes seconds and which most other commands do not need.
    import fl_tasks

    options: dict[str, object] = {} if data_root is None else {"data_root": str(data_root)}
    try:
        spec = fl_tasks.PartitionSpec(**fields)
        loaded = fl_tasks.load_task(task, options)
        total, parts = fl_tasks.training_size(loaded), fl_tasks.partition_task(spec, loaded)
        fl_tasks.save_partition(out, fl_tasks.Partition(replace(spec, clients=len(parts)), total, parts))
    except fl_tasks.TaskError as exc:
        raise UsageError(str(exc)) from exc
    except OSError as exc:
        raise Refused(f"{out} cannot be written: {exc.strerror or exc}") from exc
    sizes = [len(part) for part in parts]
    try:
        classes, numbers = fl_tasks.training_labels(loaded).unique(return_inverse=True)
    except fl_tasks.TaskError:
        return _Counts(total, sizes, None)
    return _Counts(total, sizes, [numbers[part].bincount(minlength=len(classes)).tolist() for part in parts])


def _sizes(sizes: list[int]) -> RenderableType:
    table = FittedTable((">Client", ">Examples"))
    for client, size in enumerate(sizes):
        table.add_row(str(client), str(size))
    return table


def _table(counts: list[list[int]]) -> RenderableType:
    """A row for each client: examples of each class, or the number of its classes if there are too many for a line."""
    every = FittedTable((">Client", ">Examples", *(f">{label}" for label in range(len(counts[0])))))
    number = FittedTable((">Client", ">Examples", ">Classes"))
    for client, row in enumerate(counts):
        every.add_row(str(client), str(sum(row)), *map(str, row))
        number.add_row(str(client), str(sum(row)), str(sum(count > 0 for count in row)))
    return FirstThatFits([every, number]) if len(counts[0]) <= _MAX_COLUMNS else number
