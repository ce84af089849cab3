"""What `fl simulate` says while it works, and what it says at the end."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Table

from fl_ops.simulate.results import SeedResult
from fl_ops.simulate.seeds import Job, Told, simulate_all
from fl_ops.simulate.simulation import RoundResult
from fl_ops.units import NOTHING, duration, plain, size
from fl_server.stop_rules import best_round


def simulate(jobs: Sequence[Job], processes: int, console: Console) -> list[SeedResult]:
    """All runs, a line for each round. Raises what `simulate_all` raises."""
    ended: dict[int, SeedResult] = {}

    def tell(told: Told) -> None:
        if isinstance(told, SeedResult):
            ended[told.seed] = told
            say(console, f"seed {told.seed}  {told.status}: {told.reason}")
        elif isinstance(told, tuple):
            say(console, f"seed {told[0]}  {line(told[1])}")

    simulate_all(jobs, processes, tell)
    return [ended[job.seed] for job in jobs]


def line(done: RoundResult) -> str:
    """A round in words."""
    values = "".join(f", {name} {done.metrics[name]:.4f}" for name in sorted(done.metrics))
    loss = NOTHING if done.training_loss is None else f"{done.training_loss:.4f}"
    return (
        f"round {done.round}: {len(done.accepted)} clients, training loss {loss}{values}, {duration(done.seconds)}, "
        f"{size(done.bytes_down)} down, {size(done.bytes_up)} up"
    )


def table(results: Sequence[SeedResult]) -> Table:
    """A row for each seed; below, mean and standard deviation over seeds."""
    metric = str(results[0].settings["run"]["stop"]["metric"])
    shown = Table(box=None, pad_edge=False)
    for heading in ("Seed", "Ended", "Rounds", f"Final {metric}", f"Best {metric}", "In round", "Down", "Up", "Time"):
        shown.add_column(heading, justify="left" if heading == "Ended" else "right")
    finals: list[float] = []
    bests: list[float] = []
    for result in results:
        best = best_round(metric, [(each.round, each.metrics) for each in result.evaluated])
        final = result.evaluated[-1].metrics.get(metric) if result.evaluated else None
        shown.add_row(
            str(result.seed), result.status, str(len(result.rounds)), _number(final),
            _number(best.value if best else None), str(best.round) if best else NOTHING,
            size(sum(each.bytes_down for each in result.rounds)), size(sum(each.bytes_up for each in result.rounds)),
            duration(sum(each.seconds for each in result.rounds)),
        )  # fmt: skip
        if final is not None and best is not None:
            finals.append(final)
            bests.append(best.value)
    if len(finals) > 1:
        shown.add_row("mean ± s.d.", "", "", _spread(finals), _spread(bests), "", "", "", "")
    return shown


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.4f} ± {stdev(values):.4f}"


def say(console: Console, text: str) -> None:
    """A line for people."""
    console.print(plain(text), markup=False, highlight=False, soft_wrap=True)
