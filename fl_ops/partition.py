"""`fl partition`: a task's training data dealt to clients, as the file that devices are given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.table import Table

from fl_ops import output
from fl_ops.errors import Misused, Refused
from fl_ops.files import Target, check_free
from fl_ops.options import Context, command

_WIDEST = 20
"""Classes that fit side by side on a terminal."""


Method = Literal["dirichlet", "dirichlet-hsu", "dirichlet-class", "classes", "shards", "iid", "natural"]
"""Those of tasks.PartitionSpec, written out again so that `fl --help` need not load torch."""


@command
def partition(
    context: Context,
    task: Annotated[str, typer.Argument(metavar="TASK", help="A built-in task's name, or module:attribute.")],
    clients: Annotated[int, typer.Option(min=1, help="To how many clients.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the partition goes.")],
    method: Annotated[Method, typer.Option(help="How it is dealt; docs/tasks.md says what each does.")] = "dirichlet",
    alpha: Annotated[
        float, typer.Option(help="Of the dirichlets: 0.1 gives clients few classes each, 100 nearly all alike.")
    ] = 0.3,
    prior_scaled: Annotated[
        bool, typer.Option("--prior-scaled", help="Of dirichlet, dirichlet-hsu: alpha is shared out among the classes.")
    ] = False,
    rotate: Annotated[bool, typer.Option("--rotate", help="Of dirichlet-hsu: clients are filled in turn.")] = False,
    classes: Annotated[int, typer.Option(help="Of classes: how many each client draws.")] = 2,
    min_examples: Annotated[int, typer.Option(help="Of dirichlet-class: what every client must have.")] = 10,
    stratified: Annotated[
        bool, typer.Option("--stratified", help="Of iid: as many of each class for everybody.")
    ] = False,
    sigma: Annotated[
        float, typer.Option(help="Unequal sizes, lognormal; not of dirichlet-class and natural, which make their own.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed deals the same.")] = 0,
    data_root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the task's data set.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over an older file.")] = False,
) -> None:
    """Deal a task's training data to clients by a seed; client i then names the file and its number i."""
    check_free(Target(out, replace=force), "choose another --out, or say --force; devices that have it must not change")
    fields = {"method": method, "clients": clients, "seed": seed, "alpha": alpha, "prior_scaled": prior_scaled}
    fields |= {"rotate": rotate, "classes": classes, "min_examples": min_examples, "stratified": stratified}
    counts = _deal(task, data_root, {**fields, "sigma": sigma}, out)
    sizes = [sum(row) for row in counts.held]
    facts = {"path": str(out), "num_examples": counts.num_examples, "examples": sizes, "classes": counts.held}
    output.show(facts, _table(counts.held), context.as_json)


class _Counts(NamedTuple):
    """num_examples: size of the training set; held: examples of each class, for each client."""

    num_examples: int
    held: list[list[int]]


def _deal(task: str, data_root: Path | None, fields: dict[str, Any], out: Path) -> _Counts:
    """Write the partition that the fields of PartitionSpec describe. Raises Misused and Refused."""
    # Brings torch, which takes seconds and which no other command needs.
    import tasks

    options: dict[str, object] = {} if data_root is None else {"data_root": str(data_root)}
    try:
        spec = tasks.PartitionSpec(**fields)
        loaded = tasks.load_task(task, options)
        labels = tasks.training_labels(loaded)
        parts = tasks.make_partition(spec, labels, tasks.training_groups(loaded))
        tasks.save_partition(out, tasks.Partition(spec, len(labels), parts))
    except tasks.TaskError as exc:
        raise Misused(str(exc)) from exc
    except OSError as exc:
        raise Refused(f"{out} cannot be written: {exc.strerror or exc}") from exc
    classes, numbers = labels.unique(return_inverse=True)
    return _Counts(len(labels), [numbers[part].bincount(minlength=len(classes)).tolist() for part in parts])


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
