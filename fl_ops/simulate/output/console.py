"""The terminal output of `fl simulate`: a line for each round, and a table of all seeds at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fl_common.units import NOTHING, counted, duration, measured, metric_title, plain, size, value
from fl_ops.render.fitted import FittedTable
from fl_ops.simulate.output.results import SeedResult
from fl_ops.simulate.reports import Note, RoundResult, Step
from fl_ops.simulate.seeds import Job, OnReport, Report, simulate_all
from fl_server.rounds.metrics import AVERAGED, best_round
from fl_web.facts.rounds import evaluation, on_clients

_LATEST = 10
"""Rounds whose times give the time left."""


@dataclass
class _Run:
    """What is known of a run's progress."""

    rounds: int
    """The rounds in all, if no other rule ends the run earlier."""
    metric: str
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    clients: deque[int] = field(default_factory=lambda: deque(maxlen=_LATEST))
    value: float | None = None

    def add(self, done: RoundResult) -> None:
        """Another committed round."""
        self.seconds.append(done.seconds)
        self.clients.append(len(done.accepted))
        self.value = done.metrics.get(self.metric, self.value)

    def text(self, step: Step) -> str:
        """One line: round, work, latest value of the metric, clients a second, time left."""
        work = f"client {step.number} of {step.of}" if step.work == "client" else step.work
        parts = [f"round {step.round} of {self.rounds}: {work}"]
        if self.value is not None:
            parts.append(f"{metric_title(self.metric)} {measured(self.value, self.metric)}")
        if sum(self.seconds):
            parts.append(f"{sum(self.clients) / sum(self.seconds):.3g} clients/s")
            parts.append(f"{duration((self.rounds - step.round) * fmean(self.seconds))} left")
        return ", ".join(parts)


class ProgressLines:
    """A line for each seed that is being simulated."""

    def __init__(self, progress: Progress, jobs: Sequence[Job]) -> None:
        self._progress = progress
        stops = {job.seed: job.config.run.stop for job in jobs}
        self._runs = {seed: _Run(stop.rounds, stop.metric) for seed, stop in stops.items()}
        self._tasks: dict[int, TaskID] = {}

    def show(self, seed: int, step: Step) -> None:
        """The step that a seed has begun. Drawn at once at the start of a round, and some times a second after it."""
        training = step.work == "client"
        text = f"seed {seed}  {self._runs[seed].text(step)}"
        if seed not in self._tasks:
            self._tasks[seed] = self._progress.add_task(text)
        done, first = step.number - 1 if training else step.of, training and step.number == 1
        self._progress.update(self._tasks[seed], description=text, completed=done, total=step.of, refresh=first)

    def add(self, seed: int, done: RoundResult) -> None:
        """A seed has committed a round."""
        self._runs[seed].add(done)

    def remove(self, seed: int) -> None:
        """The seed has ended."""
        if seed in self._tasks:
            self._progress.remove_task(self._tasks.pop(seed))


def simulate(
    jobs: Sequence[Job], processes: int, console: Console, also: OnReport = lambda _: None
) -> list[SeedResult]:
    """Simulate all runs and print a line for each round. Raises the errors of `simulate_all`.

    also: gets each report before it is shown.
    """
    results: dict[int, SeedResult] = {}
    shown: set[str] = set()

    # At the bottom of a terminal, and nothing elsewhere.
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        lines = ProgressLines(progress, jobs)

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
        f"round {done.round}: {counted(len(done.accepted), 'client')}, "
        f"training loss {value(done.training_loss)}{metrics}, "
        f"{duration(done.seconds)}, {size(done.bytes_down)} down, {size(done.bytes_up)} up{_simulated(done)}"
        f"{'; ' if done.why_short else ''}{done.why_short}"
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
