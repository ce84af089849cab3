"""The WatchRun stream as something to look at: rows of rounds, lines of events, and how a watch ends."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Self

from fl_ops import units
from fl_ops.errors import Exit
from fl_ops.states import run_state
from protos.fl.v1 import admin_pb2

SHOWN_ROUNDS = 10
SHOWN_EVENTS = 4
_ENDS = {
    admin_pb2.RUN_STATE_COMPLETED: Exit.OK,
    admin_pb2.RUN_STATE_STOPPED: Exit.RUN_STOPPED,
    admin_pb2.RUN_STATE_FAILED: Exit.RUN_FAILED,
}


def exit_code(run: admin_pb2.RunStatus) -> Exit | None:
    """What a watch exits with when the run has ended; None while it has not."""
    return _ENDS.get(run.state)


@dataclass(frozen=True)
class Row:
    """One round to look at. None: not known (yet).

    accuracy: share of 1; loss: of the evaluation, else of training; on_clients: mean and deviation of the accuracy over
    clients, worst_decile: its mean over their worst tenth.
    """

    round: int
    phase: str
    admitted: int
    cohort: int
    accuracy: float | None = None
    loss: float | None = None
    seconds: float | None = None
    bytes_down: int | None = None
    bytes_up: int | None = None
    on_clients: tuple[float, float] | None = None
    worst_decile: float | None = None

    @classmethod
    def committed(cls, summary: admin_pb2.RoundSummary) -> Self:
        """The row of a round that is done."""
        metrics = dict(summary.metrics)
        mean, deviation = metrics.get("clients_accuracy_mean"), metrics.get("clients_accuracy_std")
        training_loss = summary.training_loss if summary.HasField("training_loss") else None
        return cls(
            round=summary.round,
            phase="committed",
            admitted=summary.accepted,
            cohort=summary.accepted + summary.dropped,
            accuracy=metrics.get("accuracy"),
            loss=metrics.get("loss", training_loss),
            seconds=summary.seconds,
            bytes_down=summary.bytes_down,
            bytes_up=summary.bytes_up,
            on_clients=None if mean is None or deviation is None else (mean, deviation),
            worst_decile=metrics.get("clients_accuracy_worst_decile"),
        )


@dataclass
class RunProgress:
    """A run as its watcher has seen it so far. Keeps the latest rounds and events only: a run can last for weeks."""

    run: admin_pb2.RunStatus = field(default_factory=admin_pb2.RunStatus)
    events: deque[str] = field(default_factory=lambda: deque(maxlen=SHOWN_EVENTS))
    _rounds: dict[int, Row] = field(default_factory=dict)

    def feed(self, seen: admin_pb2.WatchRunResponse) -> None:
        """Takes in one event."""
        self.run = seen.run
        for has_it, summary in ((seen.run.HasField("latest"), seen.run.latest), (seen.HasField("round"), seen.round)):
            if has_it:
                self._rounds[summary.round] = Row.committed(summary)
        for old in sorted(self._rounds)[:-SHOWN_ROUNDS]:
            del self._rounds[old]
        if (line := event_line(seen)) is not None:
            self.events.append(line)

    def rows(self) -> list[Row]:
        """The latest committed rounds and the one under way, by number."""
        rows = [self._rounds[number] for number in sorted(self._rounds)]
        if self.run.phase and self.run.rounds_done not in self._rounds:
            rows.append(Row(self.run.rounds_done, self.run.phase, self.run.admitted, len(self.run.cohort)))
        return rows


def event_line(seen: admin_pb2.WatchRunResponse) -> str | None:
    """One event in words, for logs and the foot of the live table; None for those that only move the table."""
    if seen.event in ("phase", "admitted"):
        return None
    if seen.event == "snapshot" and exit_code(seen.run) is None:
        return f"watching {seen.run.run_id}: {seen.run.rounds_done} rounds done" + _because(seen.run.reason)
    if seen.event in ("snapshot", "state"):
        return run_state(seen.run) + _because(seen.detail or seen.run.reason)
    if not seen.HasField("round"):
        return f"{seen.event.replace('_', ' ')}{_because(seen.detail)}"
    summary = seen.round
    if seen.event == "evaluated":
        values = ", ".join(f"{name} {summary.metrics[name]:.4f}" for name in sorted(summary.metrics))
        return f"round {summary.round} evaluated{_because(values)}"
    return (
        f"round {summary.round} {seen.event}: {summary.accepted} of {summary.accepted + summary.dropped} clients, "
        f"{units.duration(summary.seconds)}, {units.size(summary.bytes_down)} down, {units.size(summary.bytes_up)} up"
        + _because(seen.detail)
    )


def _because(text: str) -> str:
    return f": {text}" if text else ""
