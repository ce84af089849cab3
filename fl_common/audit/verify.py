"""Checks the chain of an audit log row by row, and names where it is broken and how.

A chain proves that its rows belong together. It does not prove that rows at its end were not removed, or that the whole
chain was not written anew by somebody who can write the ledger: for that, compare with a head of before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from fl_common.audit.rows import START, AuditRow, Head

MOST_PROBLEMS = 100


class Problem(NamedTuple):
    """A place where the chain is broken."""

    number: int
    """Of the row."""
    what: str


class ChainCheck:
    """Takes the rows in order, and keeps what is wrong with them."""

    def __init__(self, known: Iterable[Head] = (), after: Head | None = START) -> None:
        """known: rows of before, which must still be there. after: the row before the first one; None: unknown."""
        self._known = {head.number: head.hash for head in known}
        self._before: Head | None = None
        self._last = after
        self.rows = 0
        self.problems: list[Problem] = []

    @property
    def head(self) -> Head:
        """The newest row so far."""
        return self._last or START

    def add(self, row: AuditRow) -> None:
        """Check the next row."""
        self.rows += 1
        last = self._last
        if last is not None and row.number <= last.number:
            self._problem(row.number, f"row {row.number} comes behind row {last.number}: it was inserted or moved")
            return
        if last is not None and row.number > last.number + 1:
            self._problem(last.number + 1, missing(last.number + 1, row.number - 1))
            self._before = None
        elif last is not None:
            if row.linked(last.hash) != row.hash:
                self._unlinked(row, last)
            self._before = last
        expected = self._known.pop(row.number, row.hash)
        if row.hash != expected:
            what = f"row {row.number} is another one than before: expected the hash {expected.hex()}"
            self._problem(row.number, f"{what}, got {row.hash.hex()}: rows up to it were replaced")
        self._last = row.head

    def end(self, newest: Head | None = None) -> list[Problem]:
        """Check the end of the chain. newest: the newest row that its owner names. Returns all problems."""
        if newest is not None and newest.number and newest.number != self.head.number:
            self._known.setdefault(newest.number, newest.hash)
        for number in sorted(self._known):
            if number > self.head.number:
                what = f"{missing(self.head.number + 1, number)} at the end: row {number} was there before"
                self._problem(self.head.number + 1, what)
        return self.problems

    def _unlinked(self, row: AuditRow, last: Head) -> None:
        before = self._before
        if before is not None and replace(row, number=row.number - 1).linked(before.hash) == row.hash:
            what = f"row {last.number} was inserted, or exchanged with the next one: row {row.number} follows {before}"
            self._problem(last.number, what)
            return
        what = f"the hash of row {row.number} does not follow from its fields and from row {last.number}"
        self._problem(row.number, f"{what}: row {row.number} was changed, or row {last.number} with its hash")

    def _problem(self, number: int, what: str) -> None:
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(Problem(number, what))


def rows_of_lines(lines: Iterable[bytes]) -> Iterator[AuditRow]:
    """The rows of an export. Raises ValueError with the number of a line that is no row."""
    for number, line in enumerate(lines, 1):
        try:
            yield AuditRow.from_json(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is no row of an audit log: {error}") from error


def missing(first: int, last: int) -> str:
    """A gap in words."""
    return f"row {first} is missing" if first == last else f"rows {first} to {last} are missing"
