"""The state of a watched run: rows of rounds, lines of events, and the exit code at its end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from fl_common import units
from fl_ops.errors import Exit
from fl_ops.render.runs.criterion import criterion_of
from fl_ops.render.states import run_state
from protos.fl.v1 import admin_pb2

SHOWN_ROUNDS = 10
SHOWN_EVENTS = 4
KEPT_VALUES = 60
"""Rounds whose values of the metric are kept, for a sparkline."""
_ENDS = {
    admin_pb2.RUN_STATE_COMPLETED: Exit.OK,
    admin_pb2.RUN_STATE_STOPPED: Exit.RUN_STOPPED,
    admin_pb2.RUN_STATE_FAILED: Exit.RUN_FAILED,
}


def exit_code(run: admin_pb2.RunStatus) -> Exit | None:
    """The exit code for a run that has ended; None before."""
    return _ENDS.get(run.state)


@dataclass(frozen=True)
class Lost:
    """In place of an event: there is no connection to the coordinator; it is tried again."""

    why: str


@dataclass(frozen=True)
class Row:
    """One round of the table. None: not known (yet).

    metrics: of all evaluations, by name; training_loss: of the clients' local steps.
    """

    round: int
    phase: str
    admitted: int
    cohort: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    training_loss: float | None = None
    seconds: float | None = None
    bytes_down: int | None = None
    bytes_up: int | None = None

    @classmethod
    def committed(cls, summary: admin_pb2.RoundSummary) -> Self:
        """The row of a committed round."""
        return cls(
            round=summary.round,
            phase="committed",
            admitted=summary.accepted,
            cohort=summary.accepted + summary.dropped,
            metrics=dict(summary.metrics),
            training_loss=summary.training_loss if summary.HasField("training_loss") else None,
            seconds=summary.seconds,
            bytes_down=summary.bytes_down,
            bytes_up=summary.bytes_up,
        )


@dataclass
class RunProgress:
    """A run, from the events so far. Keeps only the latest rounds and events: a run can last for weeks."""

    run: admin_pb2.RunStatus = field(default_factory=admin_pb2.RunStatus)
    received: float = 0.0
    """When the latest event arrived, by the monotonic clock."""
    lost: str = ""
    """What to show while there is no connection to the coordinator."""
    cohort: admin_pb2.ListCohortResponse | None = None
    """The clients of the round under way, as they were read last; a thread replaces it."""
    events: deque[str] = field(default_factory=lambda: deque(maxlen=SHOWN_EVENTS))
    _rounds: dict[int, Row] = field(default_factory=dict)
    _values: dict[int, float] = field(default_factory=dict)

    def add(self, event: admin_pb2.WatchRunResponse) -> None:
        """Add one event."""
        self.run, self.received, self.lost = event.run, time.monotonic(), ""
        for present, summary in (
            (event.run.HasField("latest"), event.run.latest),
            (event.HasField("round"), event.round),
        ):
            if present:
                self.add_round(summary)
        if (line := event_line(event)) is not None:
            self.events.append(line)

    def add_round(self, summary: admin_pb2.RoundSummary) -> None:
        """Add a committed round, or what is new of it."""
        self._rounds[summary.round] = Row.committed(summary)
        metric = criterion_of(self.run.spec.stop).metric
        if metric in summary.metrics:
            self._values[summary.round] = summary.metrics[metric]
        for kept, most in ((self._rounds, SHOWN_ROUNDS), (self._values, KEPT_VALUES)):
            for old in sorted(kept)[:-most]:
                del kept[old]

    def values(self) -> list[float]:
        """The newest values of the run's metric, by round."""
        return [self._values[number] for number in sorted(self._values)]

    def seconds_left(self) -> float | None:
        """The expected time to the last planned round, by the newest rounds; None if nobody can know."""
        planned, seconds = self.run.spec.stop.rounds, [row.seconds for row in self._rounds.values() if row.seconds]
        if exit_code(self.run) is not None or not seconds or planned <= self.run.rounds_done:
            return None
        return (planned - self.run.rounds_done) * sum(seconds) / len(seconds)

    def rows(self) -> list[Row]:
        """The latest committed rounds and the current one, by number."""
        rows = [self._rounds[number] for number in sorted(self._rounds)]
        if self.run.phase and self.run.rounds_done not in self._rounds:
            rows.append(Row(self.run.rounds_done, self.run.phase, self.run.admitted, len(self.run.cohort)))
        return rows


def event_line(event: admin_pb2.WatchRunResponse) -> str | None:
    """One event as a line, for logs and the live table; None for events that only change the table."""
    if event.event in ("phase", "admitted"):
        return None
    if event.event == "snapshot" and exit_code(event.run) is None:
        return f"watching {event.run.run_id}: {event.run.rounds_done} rounds done" + _detail(event.run.reason)
    if event.event in ("snapshot", "state"):
        return run_state(event.run) + _detail(event.detail or event.run.reason)
    if not event.HasField("round"):
        return f"{event.event.replace('_', ' ')}{_detail(event.detail)}"
    summary = event.round
    if event.event == "evaluated":
        values = ", ".join(f"{units.metric_name(name)} {summary.metrics[name]:.4f}" for name in sorted(summary.metrics))
        return f"round {summary.round} evaluated{_detail(values)}"
    return (
        f"round {summary.round} {event.event}: {summary.accepted} of {summary.accepted + summary.dropped} clients, "
        f"{units.duration(summary.seconds)}, {units.size(summary.bytes_down)} down, {units.size(summary.bytes_up)} up"
        + _detail(event.detail)
    )


def _detail(text: str) -> str:
    return f": {text}" if text else ""
