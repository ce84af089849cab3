"""The terminal output of `fl simulate`: a line for each round, and a table of all seeds at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, stdev

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fl_ops.render.fitted import FittedTable
from fl_ops.render.units import NOTHING, duration, metric_name, plain, size
from fl_ops.simulate.results import SeedResult
from fl_ops.simulate.seeds import Job, Report, simulate_all
from fl_ops.simulate.simulation import Note, RoundResult, Step
from fl_server.rounds.stop_rules import best_round


def simulate(jobs: Sequence[Job], processes: int, console: Console) -> list[SeedResult]:
    """Simulate all runs and print a line for each round. Raises the errors of `simulate_all`."""
    results: dict[int, SeedResult] = {}
    shown: set[str] = set()

    with _progress_bars(console) as bars:

        def show(report: Report) -> None:
            if isinstance(report, SeedResult):
                results[report.seed] = report
                bars.remove(report.seed)
                print_line(console, f"seed {report.seed}  {report.status}: {report.reason}")
            elif isinstance(report, tuple):
                seed, what = report
                if isinstance(what, Step):
                    bars.show(seed, what)
                elif isinstance(what, RoundResult):
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


class _Bars:
    """A line for each seed that is being simulated, with the progress of its round; on a terminal only."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[int, TaskID] = {}

    def show(self, seed: int, step: Step) -> None:
        """The step that a seed has begun. Drawn at once at the start of a round, and some times a second after it."""
        training = step.work == "client"
        text = f"seed {seed}  round {step.round}: {f'client {step.number} of {step.of}' if training else step.work}"
        if seed not in self._tasks:
            self._tasks[seed] = self._progress.add_task(text)
        done, first = step.number - 1 if training else step.of, training and step.number == 1
        self._progress.update(self._tasks[seed], description=text, completed=done, total=step.of, refresh=first)

    def remove(self, seed: int) -> None:
        """The seed has ended."""
        if seed in self._tasks:
            self._progress.remove_task(self._tasks.pop(seed))


@contextmanager
def _progress_bars(console: Console) -> Iterator[_Bars]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield _Bars(progress)


def round_line(done: RoundResult) -> str:
    """A round as one line."""
    values = "".join(f", {metric_name(name)} {done.metrics[name]:.4f}" for name in sorted(done.metrics))
    loss = NOTHING if done.training_loss is None else f"{done.training_loss:.4f}"
    return (
        f"round {done.round}: {len(done.accepted)} clients, training loss {loss}{values}, {duration(done.seconds)}, "
        f"{size(done.bytes_down)} down, {size(done.bytes_up)} up"
    )


def results_table(results: Sequence[SeedResult]) -> FittedTable:
    """A row for each seed, and the mean and standard deviation over the seeds."""
    metric = str(results[0].settings["run"]["stop"]["metric"])
    table = FittedTable(
        (">Seed", "Ended", ">Rounds", f">Final {metric}", f">Best {metric}", ">In round", ">Down", ">Up", ">Time"),
        optional=("Up", "Down", "Time", "In round", "Rounds"),
    )
    finals: list[float] = []
    bests: list[float] = []
    for result in results:
        best = best_round(metric, [(each.round, each.metrics) for each in result.evaluated])
        final = result.evaluated[-1].metrics.get(metric) if result.evaluated else None
        table.add_row(
            str(result.seed), result.status, str(len(result.rounds)), _number(final),
            _number(best.value if best else None), str(best.round) if best else NOTHING,
            size(sum(each.bytes_down for each in result.rounds)), size(sum(each.bytes_up for each in result.rounds)),
            duration(sum(each.seconds for each in result.rounds)),
        )  # fmt: skip
        if final is not None and best is not None:
            finals.append(final)
            bests.append(best.value)
    if len(finals) > 1:
        table.add_row("mean ± s.d.", "", "", _spread(finals), _spread(bests), "", "", "", "")
    return table


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.4f} ± {stdev(values):.4f}"


def print_line(console: Console, text: str) -> None:
    """Print one line of plain text, without wrapping."""
    console.print(plain(text), markup=False, highlight=False, soft_wrap=True)
