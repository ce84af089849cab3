"""`fl simulate`: a run's configuration done in this process, or a run of a coordinator done again."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fl_ops import output
from fl_ops.errors import Exit, Misused
from fl_ops.options import Context, command

if TYPE_CHECKING:
    from fl_ops.simulate.again import Replayed
    from fl_ops.simulate.seeds import Job


@command
def simulate(
    context: Context,
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.TOML", help="As for `fl run create`, with a table \\[simulation].")
    ],
    seeds: Annotated[
        str | None, typer.Option(metavar="0,1,2", help="A run for each, in place of the file's seed.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time; each works on one processor.")] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where numbers and models go: a folder for each seed in it.")
    ] = None,
    replay: Annotated[
        str | None, typer.Option(metavar="RUN", help="Do this run of a coordinator again, from its ledger.")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of --replay: the coordinator's state directory; only read.")
    ] = None,
    ledger: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Of --replay: of a ledger in PostgreSQL, in place of --state-dir; only read."),
    ] = None,
    client_configs: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Of --replay: the daemons' TOML files, in place of \\[simulation]."),
    ] = None,
) -> None:
    r"""Do a run in one process, without a coordinator: the same models, bit for bit, on the CPU with close = "cohort".

    \[simulation] has clients = 100, names = "client-{index:03d}", partition = { method = "dirichlet", alpha = 0.3 }
    and validation_every = 0; docs/simulation.md says what they mean. Labels are not looked at. With --replay, exit code
    1 when a model is not the ledger's.
    """
    # Here and not above: torch takes seconds, for which no other command waits.
    from fl_client.allocator import keep_freed_memory
    from fl_ops.simulate.again import Replayed

    keep_freed_memory()
    if replay is not None:
        _do_again(context, Replayed(replay, _ledger_at(state_dir, ledger, seeds, out), config, client_configs))
        return
    if any(option is not None for option in (state_dir, ledger, client_configs)):
        raise Misused("--state-dir, --ledger and --client-configs belong to --replay RUN")
    _do_runs(context, _jobs(config, seeds, out), processes)


def _ledger_at(state_dir: Path | None, ledger: str | None, seeds: str | None, out: Path | None) -> Path | str:
    """The one place that --replay was given. Raises Misused for none, for two, or for what does not go with it."""
    place = ledger if state_dir is None else state_dir
    if seeds is not None or out is not None or place is None or None not in {ledger, state_dir}:
        raise Misused("--replay RUN goes with --state-dir DIR or --ledger URL, and with neither --seeds nor --out")
    return place


def _console(context: Context) -> Console:
    """For progress: stdout is for the result where that is JSON."""
    return Console(stderr=context.as_json, highlight=False)


def _do_again(context: Context, replayed: Replayed) -> None:
    from fl_ops.simulate import again

    facts = again.replay(replayed, _console(context))
    output.show(facts, again.verdict(facts), context.as_json)
    if not facts["same"]:
        raise typer.Exit(Exit.REFUSED)


def _do_runs(context: Context, jobs: list[Job], processes: int) -> None:
    from fl_ops.simulate import shown

    results = shown.simulate(jobs, processes, _console(context))
    facts = {"seeds": [result.as_json() for result in results]}
    output.show(facts, shown.table(results), context.as_json)
    if any(result.status == "failed" for result in results):
        raise typer.Exit(Exit.RUN_FAILED)


def _jobs(config: Path, seeds: str | None, out: Path | None) -> list[Job]:
    from fl_ops.simulate.seeds import Job
    from fl_ops.simulate.settings import read_plan

    plan = read_plan(config)
    wanted = [plan.config.seed] if seeds is None else _numbers(seeds)
    return [Job(plan, seed, None if out is None else _folder(out, seed)) for seed in wanted]


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) < 1 << 64 for part in parts):
        raise Misused(f"--seeds: expected whole numbers such as 0,1,2, got {text!r}")
    if len(set(map(int, parts))) < len(parts):
        raise Misused(f"--seeds: expected each seed once, got {text!r}")
    return [int(part) for part in parts]


def _folder(out: Path, seed: int) -> Path:
    """Made now, so that a folder that cannot be written to is told before there are results."""
    folder = out / f"seed-{seed}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        raise Misused(
            f"--out: nothing can be written to {folder}: {exc.strerror or exc}; choose another folder"
        ) from exc
    return folder
