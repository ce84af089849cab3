"""`fl run`: make, watch and steer runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from fl_ops import output, tables
from fl_ops.errors import Misused
from fl_ops.evaluations import evaluations_table
from fl_ops.follow import follow
from fl_ops.options import Context, admin_command
from fl_ops.reaching import Reaching
from fl_ops.run_file import read_run
from protos.fl.v1 import admin_pb2

app = typer.Typer(no_args_is_help=True, help="Make, watch and steer training runs.")
Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, as `fl run list` shows it.")]


@app.command()
@admin_command
def create(
    context: Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG.TOML", help="The run: task, algorithm, rounds.")],
    name: Annotated[str | None, typer.Option(help="In place of the file's name.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Then follow it as `fl run watch` does.")] = False,
) -> None:
    r"""Make a run from a TOML file; it starts by itself when enough clients are there.

    A table \[simulation] in the file is for `fl simulate` alone.
    """
    spec = read_run(config)
    if name is not None:
        spec.name = name
    with context.connect() as client:
        run = client.create_run(spec)
        if watch:
            raise typer.Exit(follow(client.watch_run(run.run_id), context.as_json))
    _show_run(context, run)


@app.command("list")
@admin_command
def list_runs(context: Context) -> None:
    """List all runs."""
    with context.connect() as client:
        runs = client.list_runs()
    output.show(runs, tables.runs_table(runs), context.as_json)


@app.command()
@admin_command
def show(
    context: Context,
    run: Run,
    target: Annotated[
        float | None, typer.Option(help="Value of the run's metric: what did it take to reach it? [default: the run's]")
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Also norms, drop-outs and times of each round.")] = False,
) -> None:
    """Show one run and its committed rounds."""
    with context.connect() as client:
        answer = client.get_run(run)
    reaching = Reaching.of(answer, target)
    facts: output.Answer = answer
    if target is not None and reaching is not None:
        facts = {**output.to_json(answer), "target": reaching.to_json()}
    output.show(facts, tables.run_details(answer, reaching, accounts=details), context.as_json)


@app.command()
@admin_command
def evaluations(
    context: Context,
    run: Run,
    number: Annotated[
        int | None,
        typer.Option("--round", min=0, max=2**32 - 1, help="A committed round. [default: the newest they saw]"),
    ] = None,
) -> None:
    """Show what each client said of a round's model by its own held-out data, the worst first."""
    with context.connect() as client:
        answer = client.list_evaluations(run, number)
    output.show(answer, evaluations_table(answer), context.as_json)


@app.command()
@admin_command
def watch(context: Context, run: Run) -> None:
    """Follow a run until it ends: exit code 0 completed, 6 stopped, 7 failed.

    A live table on a terminal, a line for each event elsewhere, a JSON object for each event with --json.
    """
    with context.connect() as client:
        raise typer.Exit(follow(client.watch_run(run), context.as_json))


@app.command()
@admin_command
def pause(context: Context, run: Run) -> None:
    """Finish the round under way and begin no other."""
    with context.connect() as client:
        _show_run(context, client.pause_run(run))


@app.command()
@admin_command
def resume(
    context: Context,
    run: Run,
    learning_rate: Annotated[
        float | None, typer.Option(metavar="RATE", help="Of a failed run: from its next round on.")
    ] = None,
) -> None:
    """Go on with a paused run, or with one that has failed from its last committed model."""
    if learning_rate is not None and not 0 < learning_rate < math.inf:
        raise Misused(f"--learning-rate: expected a number over 0, got {learning_rate:g}")
    with context.connect() as client:
        _show_run(context, client.resume_run(run, learning_rate))


@app.command()
@admin_command
def extend(
    context: Context,
    run: Run,
    rounds: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Rounds more than it had.")] = 0,
    wall_time: Annotated[float, typer.Option(min=0.0, metavar="SECONDS", help="Seconds more than it had.")] = 0.0,
) -> None:
    """Give a run more rounds or more time, also one that has ended by its limits."""
    if not rounds and not wall_time:
        raise Misused("expected --rounds N, --wall-time SECONDS or both: how much more shall the run get?")
    with context.connect() as client:
        _show_run(context, client.extend_run(run, rounds, wall_time))


@app.command()
@admin_command
def stop(
    context: Context,
    run: Run,
    reason: Annotated[str, typer.Option(help="Kept in the history.")] = "",
) -> None:
    """End a run now; the round under way is given up, committed rounds stay."""
    with context.connect() as client:
        _show_run(context, client.stop_run(run, reason))


@app.command()
@admin_command
def history(
    context: Context,
    run: Run,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="The newest so many.")] = 1_000,
) -> None:
    """Show every change of a run's state: who, what, when, why."""
    with context.connect() as client:
        entries = client.list_history(run, limit)
    output.show(entries, tables.history_table(entries), context.as_json)


def _show_run(context: Context, run: admin_pb2.RunStatus) -> None:
    output.show(run, tables.run_summary(run), context.as_json)
