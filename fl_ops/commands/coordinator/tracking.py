"""`fl run plot` and `fl track`: the rounds of runs as a picture, for TensorBoard and for MLflow."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fl_common.units import counted
from fl_ops.commands import completion
from fl_ops.commands.options import Context, TrackerFlags, admin_command
from fl_ops.environment import check_plotting
from fl_ops.errors import Refused, UsageError
from fl_ops.files import Target, check_free, written_whole
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
    facts = {"path": str(out), "runs": {run: len(curves.rounds) for run, curves in drawn.items()}, "by": by}
    counts = ", ".join(f"{run} ({counted(len(curves.rounds), 'round')})" for run, curves in drawn.items())
    context.show(facts, f"{out}: {counts}")


@admin_command
def track(
    context: Context,
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The run's id, as `fl run list` shows it.", autocompletion=completion.run_names
        ),
    ],
    tracking: TrackerFlags,
    once: Annotated[
        bool, typer.Option("--once", help="Write the rounds that are committed, and do not wait for others.")
    ] = False,
) -> None:
    """Write a run's rounds for TensorBoard or MLflow until the run ends, from its first round on.

    Nothing is written twice: the same command can be repeated after any end, also of an ended run.
    If the connection is lost, for example because the coordinator restarts, it waits and continues.
    The exit code is 0 in every state of the run. docs/operation/trackers.md lists the values.
    """
    from fl_ops.trackers.ledger import LedgerTracking

    trackers = tracking.checked()
    if not trackers:
        raise UsageError("expected --tensorboard DIR, --mlflow URI or both")
    report = (lambda _: None) if context.as_json else (lambda line: print(line, flush=True))
    with context.connect() as client:
        tracked = LedgerTracking(client, run, trackers, once, report).run()
    places = ", ".join(tracked.places)
    context.show(
        {**asdict(tracked), "places": list(tracked.places)},
        f"{tracked.run_id} is {tracked.state}: {counted(tracked.rounds, 'round')}, "
        f"{counted(tracked.values, 'new value')}; {places}",
    )
