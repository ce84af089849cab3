"""What became of one client's assignments: the record in the ledger, and how each end of an assignment is counted.

This is the only place that counts. The ledger applies it in the transaction that has the event itself, so a kill
loses no count and counts nothing twice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from sys import intern
from typing import Any, Literal, NamedTuple, Self

End = Literal["admitted", "refused", "failed", "lost"]
"""How an assignment ends by its client. One that the coordinator cancels is not counted."""
NEWEST = 20
"""Newest assignments whose ends are kept, and newest rounds whose times are kept."""
MOST_PACKAGES = 8
"""Packages whose work is kept, the latest ones."""
MOST_TEXT = 1000
"""Characters of a reason."""
HIDDEN_RUN = "-"
"""Stands for a run that is not named. No run has this id."""
DAY_S = 86_400.0


class EndedWork(NamedTuple):
    """Work that ended without an update that counts."""

    run_id: str
    round: int
    cause: str
    """Type and place of the task's own error, or the reason of a refusal; empty if unknown."""
    message: str
    time: float
    """Unix seconds."""

    def of_hidden_run(self) -> EndedWork:
        """The same without the run, and with the day alone: for a run that tells nobody who takes part in a round."""
        return self._replace(run_id=HIDDEN_RUN, round=0, time=self.time // DAY_S * DAY_S)


class Timing(NamedTuple):
    """The times of a client in one committed round. Seconds are None if the coordinator was not there to measure."""

    work_s: float | None
    transfer_s: float | None
    last: bool | None
    """Whether its update came last; None in a round that counted no other client."""
    slowness: float | None
    """Its seconds of work and transfer divided by the median of the other clients."""


@dataclass(frozen=True, slots=True)
class ClientWork:
    """What became of a client's assignments, over all runs."""

    admitted: int = 0
    """Their updates are part of a committed round, or were left out of it by its reducer."""
    refused: int = 0
    failed: int = 0
    lost: int = 0
    newest: tuple[End, ...] = ()
    """The ends of its newest assignments, the latest last."""
    last_failure: EndedWork | None = None
    last_refusal: EndedWork | None = None
    rounds: int = 0
    """Committed rounds that counted an update of it and of another client."""
    rounds_last: int = 0
    """Those of them in which its update came last."""
    timings: tuple[Timing, ...] = ()
    """The times of its newest committed rounds, the latest last."""
    epsilon: float | None = None
    """What its data has spent by its latest admitted update with privacy of records, as it says; None: not shared."""
    delta: float | None = None
    """The delta of the epsilon."""
    packages: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Work that has ended with each package, and how much of it failed or was refused, by digest."""

    @property
    def assignments(self) -> int:
        """All that ended by the client."""
        return self.admitted + self.refused + self.failed + self.lost

    def share(self, end: End) -> float:
        """Assignments that ended so, divided by all; 0 without any."""
        return getattr(self, end) / self.assignments if self.assignments else 0.0

    @property
    def last_share(self) -> float:
        """Rounds in which it came last, divided by `rounds`; 0 without any."""
        return self.rounds_last / self.rounds if self.rounds else 0.0

    def of_newest(self) -> Counter[str]:
        """The number of its newest assignments by end."""
        return Counter[str](self.newest)

    def newest_rounds(self) -> tuple[int, int]:
        """Its newest rounds with other clients, and those of them in which it came last."""
        known = [timing.last for timing in self.timings if timing.last is not None]
        return len(known), sum(known)

    def usual(self, name: Literal["work_s", "transfer_s", "slowness"]) -> float | None:
        """The median of a value over its newest rounds; None if it is known of none."""
        values = [value for timing in self.timings if (value := getattr(timing, name)) is not None]
        return median(values) if values else None

    def ended(self, end: End, what: EndedWork | None = None) -> ClientWork:
        """One more assignment has ended. what: of a failure and of a refusal."""
        changes: dict[str, Any] = {end: getattr(self, end) + 1, "newest": (*self.newest, end)[-NEWEST:]}
        counted = replace(self, **changes)
        if what is not None:
            what = what._replace(message=what.message[:MOST_TEXT], cause=what.cause[:MOST_TEXT])
        if end == "failed":
            return replace(counted, last_failure=what)
        return replace(counted, last_refusal=what) if end == "refused" else counted

    def with_package(self, package: str, *, ended: int = 1, failed: bool = False) -> ClientWork:
        """Work with a package has ended. package: empty for none. ended: 0 for an update that is refused later on.

        An update has ended the work when it comes, not when its round does: the device may have another package then.
        """
        if not package:
            return self
        before, bad = self.packages.get(package, (0, 0))
        others = {name: counts for name, counts in self.packages.items() if name != package}
        counted = [*others.items(), (package, (before + ended, bad + failed))]
        return replace(self, packages=dict(counted[-MOST_PACKAGES:]))

    def in_round(self, updates: int, timing: Timing | None) -> ClientWork:
        """A round is committed. updates: those of the client that it accepted, one in each exchange."""
        end: End = "admitted"
        newest = (*self.newest, *[end] * updates)[-NEWEST:]
        counted = replace(self, admitted=self.admitted + updates, newest=newest)
        if timing is None:
            return counted
        timings, with_others = (*self.timings, timing)[-NEWEST:], timing.last is not None
        return replace(
            counted, timings=timings, rounds=self.rounds + with_others, rounds_last=self.rounds_last + bool(timing.last)
        )

    def stating(self, epsilon: float | None, delta: float) -> ClientWork:
        """The client has said what its data has spent; None: its site does not share that any more."""
        return replace(self, epsilon=epsilon, delta=None if epsilon is None else delta)

    def released(self) -> ClientWork:
        """An operator releases the client: its newest work is judged from now on. The totals stay."""
        return replace(self, newest=(), timings=())

    def to_values(self) -> dict[str, Any]:
        """JSON values: what is 0 or empty is left out."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if value}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """What `to_values` made, also after it went through JSON."""
        own = dict(values)
        for name in ("last_failure", "last_refusal"):
            own[name] = EndedWork(*own[name]) if own.get(name) else None
        own["newest"] = tuple(map(intern, own.get("newest", ())))  # four words, and not a copy for each assignment
        own["packages"] = {name: (ended, failed) for name, (ended, failed) in own.get("packages", {}).items()}
        own["timings"] = tuple(Timing(*timing) for timing in own.get("timings", ()))
        return cls(**own)


class Arrived(NamedTuple):
    """An accepted update of a round's last exchange."""

    client_id: str
    received_at: float
    work_s: float | None
    transfer_s: float | None

    @property
    def seconds(self) -> float | None:
        """The seconds of work and transfer; None if one is unknown."""
        return None if self.work_s is None or self.transfer_s is None else self.work_s + self.transfer_s


def timings(arrived: list[Arrived]) -> dict[str, Timing]:
    """The times of each client in a round, by client; in O(n log n) for n clients."""
    if not arrived:
        return {}
    last = max(arrived, key=lambda update: (update.received_at, update.client_id)).client_id
    known = sorted(seconds for update in arrived if (seconds := update.seconds) is not None)
    return {
        update.client_id: Timing(
            _rounded(update.work_s),
            _rounded(update.transfer_s),
            update.client_id == last if len(arrived) > 1 else None,
            _rounded(_slowness(update.seconds, known)),
        )
        for update in arrived
    }


def _slowness(seconds: float | None, known: list[float]) -> float | None:
    """known: the seconds of all clients from the least, with this client's own."""
    if seconds is None or len(known) < 2:
        return None
    others = len(known) - 1
    own = bisect_left(known, seconds)

    def other(place: int) -> float:
        return known[place + (place >= own)]

    usual = (other((others - 1) // 2) + other(others // 2)) / 2
    return seconds / usual if usual else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
