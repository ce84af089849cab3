"""`fl simulate`: simulate a run in this process, or replay a run of a coordinator."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fl_common.command_help import FlagGroup
from fl_common.extras import install_hint
from fl_ops.commands.options import Context, EngineFlags, TrackerFlags, command
from fl_ops.errors import Exit, UsageError
from fl_ops.files import writable_folder
from fl_ops.render import output

if TYPE_CHECKING:
    from fl_ops.simulate.output.results import SeedResult
    from fl_ops.simulate.seeds import Job
    from fl_ops.trackers.opening import Trackers


@dataclass(frozen=True)
class RunFlags(FlagGroup):
    """Which runs are simulated, and how many at a time."""

    seeds: Annotated[
        str | None, typer.Option(metavar="0,1,2", help="Simulate one run for each seed, instead of the file's seed.")
    ] = None
    processes: Annotated[int, typer.Option(min=1, help="Number of parallel runs, of different seeds.")] = 1


@dataclass(frozen=True)
class ResultFlags(FlagGroup):
    """Where results go, and how a stopped run is continued."""

    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write results and models here, in a folder for each seed.")
    ] = None
    continues: Annotated[
        bool,
        typer.Option("--continue", help="Continue the runs in --out that were stopped, with the same results."),
    ] = False
    save_every: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Time between two saves in --out, for --continue. Default: 30."),
    ] = None
    profile: Annotated[bool, typer.Option("--profile", help="Print where the time went.")] = False


@dataclass(frozen=True)
class ReplayFlags(FlagGroup):
    """A run of a coordinator that is computed again."""

    replay: Annotated[
        str | None, typer.Option(metavar="RUN", help="Replay this run of a coordinator from its ledger.")
    ] = None
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --replay: the coordinator's state directory; only read.")
    ] = None
    ledger: Annotated[
        str | None,
        typer.Option(metavar="URL", help="With --replay: a ledger in PostgreSQL, instead of --state-dir; only read."),
    ] = None
    client_configs: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --replay: the daemons' TOML files, instead of \\[simulation]."),
    ] = None

    def place(self) -> Path | str:
        """The ledger. Raises UsageError for none and for two."""
        place = self.ledger if self.state_dir is None else self.state_dir
        if place is None or None not in {self.ledger, self.state_dir}:
            raise UsageError(_WITH_REPLAY)
        return place


_WITH_REPLAY = "--replay RUN requires --state-dir DIR or --ledger URL, and excludes --seeds and --out"


@command
def simulate(
    context: Context,
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.TOML", help="As for `fl run create`, with a table \\[simulation].")
    ],
    runs: RunFlags,
    engine: EngineFlags,
    *,
    distributed: Annotated[
        bool, typer.Option("--distributed", help="Share the clients with the other processes that torchrun started.")
    ] = False,
    results: ResultFlags,
    tracking: TrackerFlags,
    replay: ReplayFlags,
) -> None:
    r"""Simulate a run on this machine, without a coordinator.

    With close = "cohort" on a CPU, the models equal those of a networked run bit for bit.

    The defaults of \[simulation] are clients = 100, names = "client-{index:03d}", partition = { method = "iid" } and
    validation_every = 0; docs/simulation/simulation.md explains them. Labels are ignored. With --replay, the exit
    code is 1 if a model differs from the ledger's.
    """
    from fl_common.allocator import keep_freed_memory

    keep_freed_memory()
    if replay.replay is not None:
        if runs.seeds is not None or results.out is not None:
            raise UsageError(_WITH_REPLAY)
        if tracking != TrackerFlags():
            raise UsageError("--replay compares models only: `fl track` writes a coordinator's run")
        _replay(context, config, replay, engine)
        return
    if replay != ReplayFlags():
        raise UsageError("--state-dir, --ledger and --client-configs require --replay RUN")
    jobs = _jobs(config, runs, results)
    options = engine.request().options(runs=_processes_here() if distributed else min(runs.processes, len(jobs)))
    request = _Request([replace(job, engine=options) for job in jobs], runs.processes, tracking.checked())
    (_simulate_distributed if distributed else _simulate)(context, request, profile=results.profile)


def _processes_here() -> int:
    """Processes that torchrun started on this machine; they share its processors."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _console(context: Context) -> Console:
    """The console for progress: with --json, stdout is for the result only."""
    return Console(stderr=context.as_json, highlight=False)


def _replay(context: Context, config: Path, flags: ReplayFlags, engine: EngineFlags) -> None:
    from fl_ops.simulate.replay import ReplayRequest, replay, summary

    options = engine.request().options(replays=True)
    request = ReplayRequest(flags.replay or "", flags.place(), config, flags.client_configs, options)
    facts = replay(request, _console(context))
    output.show(facts, summary(facts), context.as_json)
    if not facts["same"]:
        raise typer.Exit(Exit.REFUSED)


@dataclass(frozen=True)
class _Request:
    """Which runs to simulate, how many at a time, and where they are tracked."""

    jobs: list[Job]
    processes: int
    trackers: Trackers


def _simulate(context: Context, request: _Request, *, profile: bool) -> None:
    from fl_ops.simulate.output import console

    screen = _console(context)
    results = _tracked(request, screen)
    if (folder := request.jobs[0].folder) is not None:
        _plot(results, folder.parent, screen)
    facts = {"seeds": [result.as_json() for result in results]}
    output.show(facts, console.results_table(results), context.as_json)
    if profile and not context.as_json:
        output.show({}, console.profile_table(results), as_json=False)
    if any(result.status == "failed" for result in results):
        raise typer.Exit(Exit.RUN_FAILED)


def _tracked(request: _Request, screen: Console) -> list[SeedResult]:
    """Simulate, and write the rounds to the trackers as they are committed."""
    from fl_ops.simulate.output import console

    if not request.trackers:
        return console.simulate(request.jobs, request.processes, screen)
    from fl_ops.trackers.simulated import OpenRuns, TrackedSeeds

    with OpenRuns(request.trackers, lambda line: console.print_line(screen, line)) as runs:
        results = console.simulate(request.jobs, request.processes, screen, TrackedSeeds(runs, request.jobs))
    runs.check()
    return results


def _plot(results: list[SeedResult], folder: Path, screen: Console) -> None:
    """Draw the plot of all seeds, where matplotlib is installed."""
    from fl_ops.simulate.output.console import print_line
    from fl_ops.simulate.output.results import PLOT, draw

    if find_spec("matplotlib") is None:
        print_line(screen, f"{PLOT} is not drawn without matplotlib: {install_hint('demo')}")
    elif draw(results, folder / PLOT):
        print_line(screen, f"plot: {folder / PLOT}")


def _simulate_distributed(context: Context, request: _Request, *, profile: bool) -> None:
    """Rank 0 prints and writes the results; the others do their share of the work."""
    from fl_ops.simulate.ranks.group import joined
    from fl_ops.simulate.seeds import simulate_all

    if request.processes > 1:
        raise UsageError(
            f"--processes {request.processes}: expected 1 with --distributed, whose runs follow one another"
        )
    with joined() as ranks:
        jobs = [replace(job, engine=replace(job.engine, ranks=ranks)) for job in request.jobs]
        if ranks.rank:
            simulate_all(jobs, 1, lambda _: None)
        else:
            _simulate(context, replace(request, jobs=jobs), profile=profile)


def _jobs(config: Path, runs: RunFlags, results: ResultFlags) -> list[Job]:
    from fl_ops.simulate.engine_choice import SEQUENTIAL
    from fl_ops.simulate.saving.save import SAVE_EVERY_S
    from fl_ops.simulate.seeds import Job
    from fl_ops.simulate.settings import read_simulation

    out = results.out
    if out is None and (results.continues or results.save_every is not None):
        raise UsageError("--continue and --save-every require --out DIR, the folder of the runs")
    simulation = read_simulation(config)
    seeds = [simulation.run.seed] if runs.seeds is None else _seeds(runs.seeds)
    folders = {seed: None if out is None else out / f"seed-{seed}" for seed in seeds}
    for folder in filter(None, folders.values()):
        writable_folder(folder)
    save_every = SAVE_EVERY_S if results.save_every is None else results.save_every
    return [
        Job(simulation, seed, folder, SEQUENTIAL, results.continues, save_every) for seed, folder in folders.items()
    ]


def _seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) < 1 << 64 for part in parts):
        raise UsageError(f"--seeds: expected whole numbers such as 0,1,2, got {text!r}")
    if len(set(map(int, parts))) < len(parts):
        raise UsageError(f"--seeds: expected each seed once, got {text!r}")
    return [int(part) for part in parts]
