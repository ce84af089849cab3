"""`fl new`: makes a package with a task of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fl_ops import new_package
from fl_ops.commands.options import Context, command
from fl_ops.render import output


@command
def new(
    context: Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the package and of its folder, as my_task.")],
    template: Annotated[
        Literal["image", "text", "tabular", "lora", "transformers"], typer.Option(help="What the task trains on.")
    ],
) -> None:
    """Make a package with a task, in a new folder: model, data reader, a shard for each of two sites, tests, a run.

    It works at once, with generated data. Its README says what to replace.
    """
    target = new_package.make(name, template, Path())
    task = new_package.task_name(name)
    text = (
        f"made {target}. Next:\n\n"
        f"  cd {target}\n"
        f"  fl task check {task} --folder data/site-0 --folder data/site-1\n"
        "  python -m unittest\n"
        "  sh two-daemons.sh"
    )
    output.show({"folder": str(target), "task": task, "template": template}, text, context.as_json)
