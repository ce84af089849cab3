"""The terminal output of `fl simulate`: a line for each round, and a table of all seeds at the end."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from rich.console import Console

from fl_common.units import NOTHING, duration, plain, size, value
from fl_ops.render.fitted import FittedTable
from fl_ops.simulate.output.progress import progress_lines
from fl_ops.simulate.output.results import SeedResult
from fl_ops.simulate.reports import Note, RoundResult, Step
from fl_ops.simulate.seeds import Job, OnReport, Report, simulate_all
from fl_server.rounds.directions import AVERAGED
from fl_server.rounds.stop_rules import best_round
from fl_web.facts.rounds import evaluation, on_clients


def simulate(
    jobs: Sequence[Job], processes: int, console: Console, also: OnReport = lambda _: None
) -> list[SeedResult]:
    """Simulate all runs and print a line for each round. Raises the errors of `simulate_all`.

    also: gets each report before it is shown.
    """
    results: dict[int, SeedResult] = {}
    shown: set[str] = set()

    stops = {job.seed: job.config.run.stop for job in jobs}
    with progress_lines(console, {seed: (stop.rounds, stop.metric) for seed, stop in stops.items()}) as lines:

        def show(report: Report) -> None:
            also(report)
            if isinstance(report, SeedResult):
                results[report.seed] = report
                lines.remove(report.seed)
                print_line(console, f"seed {report.seed}  {report.status}: {report.reason}")
            elif isinstance(report, tuple):
                seed, what = report
                if isinstance(what, Step):
                    lines.show(seed, what)
                elif isinstance(what, RoundResult):
                    lines.add(seed, what)
                    print_line(console, f"seed {seed}  {round_line(what)}")
                elif isinstance(what, Note):
                    print_line(console, f"seed {seed}  {what.text}")
                elif what.trace and what.trace not in shown:
                    # Once: the same fault would be printed for every client of every round.
                    shown.add(what.trace)
                    for line in (*what.trace.splitlines(), f"seed {seed}  {what}"):
                        print_line(console, line)

        simulate_all(jobs, processes, show)
    return [results[job.seed] for job in jobs]


def round_line(done: RoundResult) -> str:
    """A round as one line."""
    metrics = "".join(f", {text}" for text in (evaluation(done.metrics), *on_clients(done.metrics)) if text)
    return (
        f"round {done.round}: {len(done.accepted)} clients, training loss {value(done.training_loss)}{metrics}, "
        f"{duration(done.seconds)}, {size(done.bytes_down)} down, {size(done.bytes_up)} up{_simulated(done)}"
    )


def _simulated(done: RoundResult) -> str:
    if done.simulated_s is None or done.simulated_total_s is None:
        return ""
    return f", {duration(done.simulated_s)} simulated, {duration(done.simulated_total_s)} in all"


def results_table(results: Sequence[SeedResult]) -> FittedTable:
    """A row for each seed, and the mean and standard deviation over the seeds."""
    criterion = results[0].criterion
    metric = criterion.metric
    columns = (">Seed", "Ended", ">Rounds", f">Final {metric}", f">Best {metric}", ">In round", ">Down", ">Up", ">Time")
    simulated = [result.rounds[-1].simulated_total_s if result.rounds else None for result in results]
    timed = (">Simulated",) if any(simulated) else ()
    averaged = (">Final averaged",) if any(_averaged(result) is not None for result in results) else ()
    table = FittedTable((*columns, *averaged, *timed), optional=("Up", "Down", "Time", "In round", "Rounds"))
    finals: list[float] = []
    bests: list[float] = []
    for result, total in zip(results, simulated, strict=True):
        best = best_round(criterion, [(each.round, each.metrics) for each in result.evaluated])
        final = result.evaluated[-1].metrics.get(metric) if result.evaluated else None
        table.add_row(
            str(result.seed), result.status, str(len(result.rounds)), _number(final),
            _number(best.value if best else None), str(best.round) if best else NOTHING,
            size(sum(each.bytes_down for each in result.rounds)), size(sum(each.bytes_up for each in result.rounds)),
            duration(sum(each.seconds for each in result.rounds)),
            *(_number(_averaged(result)) for _ in averaged),
            *(NOTHING if total is None else duration(total) for _ in timed),
        )  # fmt: skip
        if final is not None and best is not None:
            finals.append(final)
            bests.append(best.value)
    if len(finals) > 1:
        table.add_row("mean ± s.d.", "", "", _spread(finals), _spread(bests), *[""] * (4 + len(averaged) + len(timed)))
    return table


def _averaged(result: SeedResult) -> float | None:
    """The run's metric of its last averaged model."""
    if not result.evaluated:
        return None
    return result.evaluated[-1].metrics.get(f"{AVERAGED}{result.criterion.metric.removeprefix(AVERAGED)}")


def profile_table(results: Sequence[SeedResult]) -> FittedTable:
    """Where the time of all runs together went."""
    table = FittedTable(("Part", ">Time", ">Share", ">Each round"))
    parts: dict[str, float] = {}
    for result in results:
        for part, seconds in result.profile.items():
            parts[part] = parts.get(part, 0.0) + seconds
    total, rounds = sum(parts.values()), max(1, sum(len(result.rounds) for result in results))
    for part, seconds in sorted(parts.items(), key=lambda each: -each[1]):
        table.add_row(
            part, duration(seconds), f"{seconds / total:.0%}" if total else NOTHING, duration(seconds / rounds)
        )
    return table


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.4f} ± {stdev(values):.4f}"


def print_line(console: Console, text: str) -> None:
    """Print one line of plain text, without wrapping."""
    console.print(plain(text), markup=False, highlight=False, soft_wrap=True)
