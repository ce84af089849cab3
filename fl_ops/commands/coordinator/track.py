"""`fl track`: a run's rounds for TensorBoard and MLflow."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fl_ops.commands import completion
from fl_ops.commands.options import Context, TrackerFlags, admin_command
from fl_ops.errors import UsageError
from fl_ops.render import output


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
    output.show(
        {**asdict(tracked), "places": list(tracked.places)},
        f"{tracked.run_id} is {tracked.state}: {tracked.rounds} rounds, {tracked.values} new values; {places}",
        context.as_json,
    )
