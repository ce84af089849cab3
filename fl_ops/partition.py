"""`fl partition`: a task's training data dealt to clients, as the file that devices are given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from fl_ops import output
from fl_ops.errors import Misused, Refused
from fl_ops.files import Target, check_free
from fl_ops.options import Context, command

_WIDEST = 20
"""Classes that fit side by side on a terminal."""


@command
def partition(
    context: Context,
    task: Annotated[str, typer.Argument(metavar="TASK", help="A built-in task's name, or module:attribute.")],
    clients: Annotated[int, typer.Option(min=1, help="To how many clients.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the partition goes.")],
    method: Annotated[Literal["dirichlet", "iid", "shards"], typer.Option(help="How it is dealt.")] = "dirichlet",
    alpha: Annotated[
        float, typer.Option(help="Of dirichlet: 0.1 gives clients few classes each, 100 nearly all alike.")
    ] = 0.3,
    seed: Annotated[int, typer.Option(min=0, help="The same seed deals the same.")] = 0,
    data_root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the task's data set.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over an older file.")] = False,
) -> None:
    """Deal a task's training data to clients by a seed; client i then names the file and its number i."""
    check_free(Target(out, replace=force), "choose another --out, or say --force; devices that have it must not change")
    # Brings torch, which takes seconds and which no other command needs.
    from tasks import Partition, PartitionSpec, TaskError, load_task, make_partition, save_partition, training_labels

    options: dict[str, Any] = {} if data_root is None else {"data_root": str(data_root)}
    try:
        spec = PartitionSpec(method, clients, seed, alpha)
        labels = training_labels(load_task(task, options))
        parts = make_partition(spec, labels)
        save_partition(out, Partition(spec, len(labels), parts))
    except TaskError as exc:
        raise Misused(str(exc)) from exc
    except OSError as exc:
        raise Refused(f"{out} cannot be written: {exc.strerror or exc}") from exc
    classes, numbers = labels.unique(return_inverse=True)
    counts = [numbers[part].bincount(minlength=len(classes)).tolist() for part in parts]
    facts = {"path": str(out), "num_examples": len(labels), "examples": [sum(row) for row in counts], "classes": counts}
    output.show(facts, _table(counts), context.as_json)


def _table(counts: list[list[int]]) -> Table:
    """How many examples of each class a client holds, clients down, classes across; with many classes, how many."""
    wide = len(counts[0]) <= _WIDEST
    table = Table(box=None, pad_edge=False)
    for heading in ("Client", "Examples", *(map(str, range(len(counts[0]))) if wide else ("Classes",))):
        table.add_column(heading, justify="right")
    for client, row in enumerate(counts):
        held = row if wide else [sum(count > 0 for count in row)]
        table.add_row(str(client), str(sum(row)), *map(str, held))
    return table
