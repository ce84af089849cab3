"""Availability of one client's device: intervals of simulated time, drawn or measured, asked for in the order of time.

Draws are hashes of names: the same on every machine, in any order. Measured values are read from CSV files.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from statistics import NormalDist

from fl_ops.simulate.system.section import DutyCycle, Range
from fl_server.errors import InvalidInput
from fl_server.rounds.sampling import ticket

_TICKETS = 1 << 64
_NORMAL = NormalDist()


def draw_share(kind: str, *parts: object) -> float:
    """A number between 0 and 1, uniform over the parts; the 53 bits of a float64 of it are random."""
    return ((ticket(kind, *parts) >> 12) + 0.5) / (_TICKETS >> 12)


def draw_lognormal(median: float, sigma: float, share: float) -> float:
    """The quantile of a lognormal distribution at a share between 0 and 1."""
    return median * math.exp(sigma * _NORMAL.inv_cdf(share))


def draw_exponential(mean: float, share: float) -> float:
    """The quantile of an exponential distribution at a share between 0 and 1."""
    return -mean * math.log1p(-share)


CLIENT, DEVICE, BEGIN, END = "client", "device", "begin_s", "end_s"

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Trace:
    """The rows of a CSV file. key: of the setting that names it, for messages."""

    key: str
    file: str
    rows: Sequence[Mapping[str, str]]

    def of_clients(self, column: str, allowed: Range, clients: Iterable[str], seed: int) -> dict[str, float]:
        """Each client's number of a column. Raises InvalidInput."""
        self._require(column)
        values = [self._number(row, column, at, allowed) for at, row in enumerate(self.rows, start=2)]
        if CLIENT in self.rows[0]:
            by_client = {row[CLIENT]: value for row, value in zip(self.rows, values, strict=True)}
            return {client: by_client[client] for client in self._all_in(by_client, clients)}
        return {client: values[_place(seed, client, len(values))] for client in clients}

    def intervals(self, allowed: Range, clients: Iterable[str], seed: int) -> dict[str, list[Interval]]:
        """Each client's intervals, in order and apart from each other. Raises InvalidInput."""
        named = CLIENT if CLIENT in self.rows[0] else DEVICE
        for column in (named, BEGIN, END):
            self._require(column)
        by_client: dict[str, list[Interval]] = {}
        for at, row in enumerate(self.rows, start=2):
            begin, end = (self._number(row, column, at, allowed) for column in (BEGIN, END))
            if end <= begin:
                raise InvalidInput(self.key, f"{END} over {BEGIN} ({begin:g}) in line {at} of {self.file}", f"{end:g}")
            by_client.setdefault(row[named], []).append((begin, end))
        for name, intervals in by_client.items():
            intervals.sort()
            self._check_apart(name, intervals)
        if named == CLIENT:
            return {client: by_client[client] for client in self._all_in(by_client, clients)}
        devices = sorted(by_client)
        return {client: by_client[devices[_place(seed, client, len(devices))]] for client in clients}

    def _check_apart(self, name: str, intervals: Sequence[Interval]) -> None:
        for before, after in pairwise(intervals):
            if after[0] <= before[1]:
                expected = f"intervals of {name} that are apart in {self.file}"
                raise InvalidInput(
                    self.key, expected, f"{before[0]:g} to {before[1]:g} and {after[0]:g} to {after[1]:g}"
                )

    def _all_in(self, known: Mapping[str, object], clients: Iterable[str]) -> list[str]:
        clients = list(clients)
        if absent := [client for client in clients if client not in known]:
            expected = f"a row for every client in {self.file}, which has the column {CLIENT}"
            raise InvalidInput(self.key, expected, f"none for {absent[0]}, the first of {len(absent)} without one")
        return clients

    def _require(self, column: str) -> None:
        if column not in self.rows[0]:
            raise InvalidInput(
                self.key, f"the column {column} in {self.file}", f"the columns {', '.join(self.rows[0])}"
            )

    def _number(self, row: Mapping[str, str], column: str, line: int, allowed: Range) -> float:
        try:
            value = float(row[column])
        except (TypeError, ValueError):  # a short row has None
            value = float("nan")
        if not allowed.has(value):
            expected = f"{allowed.words} in the column {column} of {self.file}, line {line}"
            raise InvalidInput(self.key, expected, repr(row[column]))
        return value


def read_trace(key: str, file: str) -> Trace:
    """Read a CSV file with a header and at least one row. Raises InvalidInput."""
    try:
        with Path(file).open(newline="", encoding="utf-8-sig") as opened:
            rows = list(csv.DictReader(opened, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput(key, f"a CSV file that can be read at {file}", error) from error
    if not rows:
        raise InvalidInput(key, f"a header and at least one row in {file}", "none")
    return Trace(key, file, rows)


def _place(seed: int, client: str, count: int) -> int:
    """The row, of `count`, that a client draws; the same in every file of as many rows."""
    return ticket("system-row", seed, client) * count >> 64


class Availability:
    """The intervals of one client, of which it keeps the current or the next one only.

    Every question is about a time that is not before that of the question before.
    """

    __slots__ = ("_begin", "_end", "_intervals")

    def __init__(self, intervals: Iterable[Interval]) -> None:
        """intervals: [begin, end) in seconds since the start of the run, in order and apart; may be endless."""
        self._intervals = iter(intervals)
        self._begin, self._end = next(self._intervals, _NEVER)

    def leaves(self, now: float) -> float | None:
        """The end of the interval that contains `now`; None if the client is away."""
        self._go_to(now)
        return self._end if self._begin <= now else None

    def comes(self, now: float) -> float:
        """`now` if the client is there, else the begin of its next interval; infinity if there is none."""
        self._go_to(now)
        return max(self._begin, now)

    def _go_to(self, now: float) -> None:
        while self._end <= now:
            self._begin, self._end = next(self._intervals, _NEVER)


_NEVER: Interval = (math.inf, math.inf)
ALWAYS: Interval = (0.0, math.inf)


def duty_cycle(cycle: DutyCycle, seed: int, client: str) -> Iterator[Interval]:
    """Exponential times on and off, without end.

    At time 0 the client is on with the probability on_s / (on_s + off_s). The rest of an exponential time has the same
    distribution as all of it, so the first time on or off is drawn as the others are.
    """
    there = draw_share("system-first", seed, client) < cycle.on_s / (cycle.on_s + cycle.off_s)
    now = 0.0
    for number in count():
        if number or not there:
            now += draw_exponential(cycle.off_s, draw_share("system-off", seed, client, number))
        end = now + draw_exponential(cycle.on_s, draw_share("system-on", seed, client, number))
        yield now, end
        now = end


def repeated(intervals: Sequence[Interval], period: float | None) -> Iterator[Interval]:
    """The intervals, and the same again after every `period` seconds; None: once.

    An interval to the end of a period and one from the begin of the next are one.
    """
    if period is None:
        yield from intervals
    elif math.isclose(intervals[0][1] - intervals[0][0], period):
        yield ALWAYS
    else:
        pending: Interval | None = None
        for shift in count():
            for begin, end in intervals:
                begin, end = begin + shift * period, end + shift * period  # noqa: PLW2901 - of this period
                if pending is not None and math.isclose(begin, pending[1]):
                    pending = pending[0], end
                    continue
                if pending is not None:
                    yield pending
                pending = begin, end
