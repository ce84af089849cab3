"""`fl run plot`: runs as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fl_ops.commands import completion
from fl_ops.commands.options import Context, admin_command
from fl_ops.environment import check_plotting
from fl_ops.errors import Refused, UsageError
from fl_ops.files import Target, check_free, written_whole
from fl_ops.render import output
from fl_ops.render.plot import Axis, draw


@admin_command
def plot(
    context: Context,
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Ids of runs.", autocompletion=completion.run_names)
    ],
    out: Annotated[Path, typer.Option(metavar="FILE.png", help="The picture.")],
    by: Annotated[
        Axis, typer.Option(help="The x axis: rounds, bytes of all clients, or time of the rounds.")
    ] = "rounds",
    force: Annotated[bool, typer.Option("--force", help="Replace an older file.")] = False,
) -> None:
    """Draw the metric, accuracy, losses and the spread over clients of one run or several."""
    check_plotting("fl run plot")
    if out.suffix.lower() != ".png":
        raise UsageError(f"--out: expected a name that ends with .png, got {out}")
    target = Target(out, replace=force)
    check_free(target, "choose another --out, or use --force")
    with context.connect() as client:
        drawn = {run: client.runs.get_run(run) for run in dict.fromkeys(runs)}
    with written_whole(target) as file:
        if not draw(drawn, by, file):
            raise Refused(f"no round of {', '.join(drawn)} has an evaluation or a loss yet: nothing is drawn")
    facts = {"path": str(out), "runs": {run: len(each.rounds) for run, each in drawn.items()}, "by": by}
    counts = ", ".join(f"{run} ({len(each.rounds)} rounds)" for run, each in drawn.items())
    output.show(facts, f"{out}: {counts}", context.as_json)
