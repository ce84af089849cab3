"""`fl task check`: tries a task on this machine, and shows what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fl_common.command_help import Group, examples
from fl_ops.commands import completion
from fl_ops.commands.options import Context, command
from fl_ops.errors import Refused, UsageError
from fl_ops.render import output

app = typer.Typer(cls=Group, no_args_is_help=True, help="Check tasks before a run uses them.")


@app.command(
    **examples(
        "fl task check my_task:Wine --option hidden=32",
        "fl task check my_task.task:MyTask --folder data/site-0 --folder data/site-1",
    )
)
@command
def check(
    context: Context,
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK", help="A built-in task's name, or module:attribute.", autocompletion=completion.task_names
        ),
    ],
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of the task; the value as in TOML.")
    ] = None,
    folder: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="The data of one site; repeat it for several sites."),
    ] = None,
) -> None:
    """Try one step of a task on this machine, and show what is wrong.

    The checks are those of a coordinator that creates a run and of a device that trains: model, data, label order, one
    step, metrics, determinism, shards with no and one example, export. Nothing is sent.
    """
    options = _options(option or [])
    if missing := [path for path in folder or [] if not path.is_dir()]:
        raise UsageError(f"--folder: expected a folder with the data of a site, got {missing[0]}")
    # Imported here because it loads torch, which takes seconds and which most other commands do not need.
    from fl_ops.task_check.checks import FAIL, findings

    rows = list(findings(task, options, folder or []))
    table = "\n".join(f"{finding.result:6} {finding.check}: {finding.text}" for finding in rows)
    output.show({"task": task, "findings": [vars(finding) for finding in rows]}, table, context.as_json)
    if failed := [finding for finding in rows if finding.result == FAIL]:
        raise Refused(f"task {task}: {failed[0].check} failed")


def _options(given: list[str]) -> dict[str, object]:
    """Options by name. A value that is not TOML is text. Raises UsageError for one without a name."""
    import tomllib

    options: dict[str, object] = {}
    for option in given:
        name, equals, text = option.partition("=")
        if not name or not equals:
            raise UsageError(f"--option: expected KEY=VALUE, got {option!r}")
        try:
            options[name] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            options[name] = text
    return options
