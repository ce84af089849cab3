"""`fl run`: create, watch and control runs."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fl_common.command_help import Group, examples
from fl_common.units import counted, plain
from fl_ops.admin import watching
from fl_ops.admin.watching import cohort_read
from fl_ops.commands import completion
from fl_ops.commands.coordinator.tracking import plot
from fl_ops.commands.options import Context, admin_command, confirm, interruptible
from fl_ops.errors import UsageError
from fl_ops.exports.download import opened_model
from fl_ops.files import read_run
from fl_ops.render import output, tables
from fl_ops.render.rounds import TargetCost, evaluations_table
from fl_ops.render.watching import KEPT_VALUES, show_until_end
from protos.fl.v1 import admin_pb2

app = typer.Typer(cls=Group, no_args_is_help=True, help="Create, watch and control training runs.")
Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="The run's id, as `fl run list` shows it.", autocompletion=completion.run_names),
]


@app.command(**examples("fl run create config.toml", "fl run create config.toml --name second --watch"))
@admin_command
def create(
    context: Context,
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.TOML", help="The run's task, algorithm, rounds and other settings.")
    ],
    name: Annotated[str | None, typer.Option(help="Overrides the name in the file.")] = None,
    initial_model: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Start from this safetensors file, which is sent; from run:RUN_ID:ROUND; or from file:NAME of the"
            " coordinator's models_dir. Overrides initial_model of CONFIG.TOML.",
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Then watch it, as `fl run watch`.")] = False,
) -> None:
    r"""Create a run from a TOML file. It starts by itself when enough clients are present.

    A table \[simulation] in the file is for `fl simulate` only.
    """
    spec = read_run(config)
    if name is not None:
        spec.name = name
    if initial_model is not None:
        spec.initial_model = initial_model
    with context.connect() as client:
        if spec.initial_model and not spec.initial_model.startswith(("run:", "file:", "upload:")):
            with opened_model(Path(spec.initial_model)) as file:
                spec.initial_model = client.models.upload_model(file)
        created = client.runs.create_run(spec)
        run = created.run
        for remark in created.remarks:
            typer.echo(f"fl: remark: {plain(remark)}", err=True)
        if watch:
            beside = partial(cohort_read, client, run.run_id)
            with _watched(run.run_id):
                raise typer.Exit(show_until_end(watching.watch(client, run.run_id), context.as_json, beside=beside))
    _show_run(context, run)


@app.command("list", **examples("fl run list"))
@admin_command
def list_runs(
    context: Context,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of runs, the newest; by default all.")] = None,
) -> None:
    """List all runs."""
    with context.connect() as client:
        runs = client.runs.list_runs()[-(limit or 0) :]
    context.show(runs, tables.runs_table(runs))


@app.command(**examples("fl run show digits-1 --details"))
@admin_command
def show(
    context: Context,
    run: Run,
    target: Annotated[
        float | None,
        typer.Option(help="Show the cost of reaching this value of the metric, by default the run's own target."),
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Also show norms, drop-outs and durations of each round.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of rounds, the newest; by default all.")] = None,
) -> None:
    """Show one run and its committed rounds."""
    with context.connect() as client:
        response = client.runs.get_run(run, limit)
        if limit and (target is not None or response.run.spec.stop.HasField("target")):
            response = client.runs.get_run(run)  # the cost is a sum over all rounds
    cost = TargetCost.of(response, target)
    del response.rounds[: -(limit or len(response.rounds) or 1)]
    result: output.Result = response
    if target is not None and cost is not None:
        result = {**output.to_json(response), "target": asdict(cost)}
    context.show(result, lambda: tables.run_details(response, cost, details=details))


@app.command(**examples("fl run evaluations digits-1 --round 10"))
@admin_command
def evaluations(
    context: Context,
    run: Run,
    number: Annotated[
        int | None,
        typer.Option("--round", min=0, max=2**32 - 1, help="A committed round, by default the newest evaluated one."),
    ] = None,
) -> None:
    """Show each client's evaluation of a round's model on its own held-out data, the worst first."""
    with context.connect() as client:
        response = client.runs.list_evaluations(run, number)
    context.show(response, evaluations_table(response))


@app.command(**examples("fl run watch digits-1"))
@admin_command
def watch(context: Context, run: Run) -> None:
    """Watch a run until it ends: exit code 0 completed, 6 stopped, 7 failed.

    A live table on a terminal, a line for each event elsewhere, a JSON object for each event with --json.
    If the connection is lost, for example because the coordinator restarts, it waits and continues.
    """
    with context.connect() as client:
        events = watching.watch(client, run)
        earlier, beside = partial(client.runs.get_run, run, KEPT_VALUES), partial(cohort_read, client, run)
        with _watched(run):
            raise typer.Exit(show_until_end(events, context.as_json, earlier=earlier, beside=beside))


def _watched(run: str) -> AbstractContextManager[None]:
    """States after Ctrl-C that the watch has ended, and not the run."""
    return interruptible(f"the run goes on; `fl run stop {run}` ends it")


app.command(
    **examples("fl run plot digits-1 --out digits.png", "fl run plot digits-1 digits-2 --out both.png --by bytes")
)(plot)


@app.command(**examples("fl run pause digits-1"))
@admin_command
def pause(context: Context, run: Run) -> None:
    """Finish the current round and start no other."""
    with context.connect() as client:
        _show_run(context, client.runs.pause_run(run))


@app.command(**examples("fl run resume digits-1 --learning-rate 0.05"))
@admin_command
def resume(
    context: Context,
    run: Run,
    learning_rate: Annotated[
        float | None, typer.Option(metavar="RATE", help="For a failed run: the rate from its next round on.")
    ] = None,
) -> None:
    """Continue a paused run, or a failed one from its last committed model."""
    if learning_rate is not None and not 0 < learning_rate < math.inf:
        raise UsageError(f"--learning-rate: expected a number over 0, got {learning_rate:g}")
    with context.connect() as client:
        _show_run(context, client.runs.resume_run(run, learning_rate))


@app.command(**examples("fl run extend digits-1 --rounds 20"))
@admin_command
def extend(
    context: Context,
    run: Run,
    rounds: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Number of additional rounds.")] = 0,
    wall_time: Annotated[float, typer.Option(min=0.0, metavar="SECONDS", help="Additional seconds.")] = 0.0,
) -> None:
    """Give a run more rounds or more time, even after it ended by its limits."""
    if not rounds and not wall_time:
        raise UsageError("expected --rounds N, --wall-time SECONDS or both")
    request = admin_pb2.ExtendRunRequest(run_id=run, rounds=rounds, wall_time_s=wall_time)
    _show_run(context, context.call(request, admin_pb2.ExtendRunResponse).run)


@app.command(**examples("fl run stop digits-1 --reason 'accuracy is good enough'"))
@admin_command
def stop(
    context: Context,
    run: Run,
    reason: Annotated[str, typer.Option(help="Stored in the history.")] = "",
) -> None:
    """End a run now. The current round is abandoned; committed rounds stay."""
    with context.connect() as client:
        _show_run(context, client.runs.stop_run(run, reason))


@app.command(**examples("fl run delete digits-1"))
@admin_command
def delete(
    context: Context,
    run: Run,
    reason: Annotated[str, typer.Option(help="Stored in the history.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a run that has ended: its models, updates, rounds and metrics. This cannot be undone.

    What operators did stays in its history, and its id is not used again.
    """
    with context.connect() as client:
        if not yes:
            summary = client.runs.get_run(run, 0).run
            confirm(f"Delete run {run}, with {counted(summary.rounds_done, 'round')} and all its models?", "--yes")
        request = admin_pb2.DeleteRunRequest(run_id=run, reason=reason)
        finished = client.call(request, admin_pb2.DeleteRunResponse).finished
    more = "" if finished else "; the coordinator is still removing its data, also after a restart"
    context.show({"run_id": run, "finished": finished}, f"deleted {run}{more}")


@app.command(**examples("fl run history digits-1 --limit 20"))
@admin_command
def history(
    context: Context,
    run: Run,
    limit: Annotated[int, typer.Option(min=1, max=2**32 - 1, help="Number of entries, the newest.")] = 1_000,
) -> None:
    """Show every change of a run's state: time, actor, event and reason."""
    with context.connect() as client:
        entries = client.history.list_history(run, limit)
    context.show(entries, lambda: tables.history_table(entries))


def _show_run(context: Context, run: admin_pb2.RunStatus) -> None:
    context.show(run, tables.run_summary(run))
