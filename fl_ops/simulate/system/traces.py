"""Reads what was measured on real devices from CSV files: numbers of devices, and the intervals of their availability.

A file with the column `client` has the simulated clients' own ids. In any other file the rows, or the devices of the
column `device`, are of other devices, and each client draws one of them. Columns of one file are of the same row, so
that a device that is fast and badly connected in the file is so in the simulation.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from fl_ops.simulate.system.section import Range
from fl_server.errors import InvalidInput
from fl_server.rounds.sampling import ticket

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
        found: dict[str, list[Interval]] = {}
        for at, row in enumerate(self.rows, start=2):
            begin, end = (self._number(row, column, at, allowed) for column in (BEGIN, END))
            if end <= begin:
                raise InvalidInput(self.key, f"{END} over {BEGIN} ({begin:g}) in line {at} of {self.file}", f"{end:g}")
            found.setdefault(row[named], []).append((begin, end))
        for name, intervals in found.items():
            intervals.sort()
            self._check_apart(name, intervals)
        if named == CLIENT:
            return {client: found[client] for client in self._all_in(found, clients)}
        devices = sorted(found)
        return {client: found[devices[_place(seed, client, len(devices))]] for client in clients}

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
