"""The progress of simulated runs on a terminal: a line for each run, below the lines of its rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fl_common.units import duration, measured, metric_title
from fl_ops.simulate.reports import RoundResult, Step

_LATEST = 10
"""Rounds whose times give the time left."""


@dataclass
class _Run:
    """What is known of a run's progress."""

    rounds: int
    """In all, if no other rule ends the run earlier."""
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

    def __init__(self, progress: Progress, runs: Mapping[int, tuple[int, str]]) -> None:
        """runs: rounds and metric of each seed."""
        self._progress = progress
        self._runs = {seed: _Run(rounds, metric) for seed, (rounds, metric) in runs.items()}
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


@contextmanager
def progress_lines(console: Console, runs: Mapping[int, tuple[int, str]]) -> Iterator[ProgressLines]:
    """Lines at the bottom of a terminal until the context ends; nothing elsewhere. runs: as for ProgressLines."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield ProgressLines(progress, runs)
