"""Rows of an audit log, their hashes, and the check of their chain, which names where it is broken and how.

    hash(n) = SHA-256( hash(n - 1) + field(number) + field(time_us) + field(actor) + ... + field(detail) )
    field(value) = length of the text's UTF-8 bytes, 4 bytes, big-endian + those bytes

Fields are in the order of FIELDS; numbers are decimal text. hash(0) is 32 zero bytes. The lengths make the encoding
unambiguous: no two rows have the same bytes.

A chain proves that its rows belong together. It does not prove that rows at its end were not removed, or that the whole
chain was not written anew by somebody who can write the ledger: for that, compare with a head of before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from fl_common.logs import escaped

FIELDS = ("number", "time_us", "actor", "address", "method", "subject", "result", "detail")
"""The fields in the order in which they are hashed."""
_NUMBERS = FIELDS[:2]
_LARGEST = 2**63 - 1
_MOST_CHARACTERS: Mapping[str, int] = {
    "actor": 200, "address": 200, "method": 100, "subject": 256, "result": 64, "detail": 1000,
}  # fmt: skip
HASH_BYTES = 32


class Head(NamedTuple):
    """The newest row of a chain."""

    number: int
    """0: there are no rows."""
    hash: bytes

    def __str__(self) -> str:
        return f"{self.number}:{self.hash.hex()}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a head from NUMBER:HASH. Raises ValueError."""
        number, _, digest = text.strip().partition(":")
        head = cls(int(number), bytes.fromhex(digest)) if number.isascii() and number.isdigit() else None
        if head is None or len(head.hash) != HASH_BYTES:
            raise ValueError(f"expected NUMBER:HASH with a hash of {2 * HASH_BYTES} hex digits, got {text[:100]!r}")
        return head


START = Head(0, bytes(HASH_BYTES))
"""The head of an empty chain."""


@dataclass(frozen=True, slots=True)
class AuditRow:
    """A row with its place in the chain."""

    number: int
    """Rows count from 1, without gaps."""
    time_us: int
    """Unix time in whole microseconds, by the writer's clock."""
    actor: str
    address: str
    method: str
    subject: str
    result: str
    detail: str
    hash: bytes = b""

    @property
    def head(self) -> Head:
        """This row as the newest of a chain."""
        return Head(self.number, self.hash)

    def linked(self, previous: bytes) -> bytes:
        """The hash that this row has behind a row with the hash `previous`."""
        digest = hashlib.sha256(previous)
        for name in FIELDS:
            value = str(getattr(self, name)).encode("utf-8", "surrogatepass")
            digest.update(len(value).to_bytes(4, "big") + value)
        return digest.digest()

    def to_json(self) -> str:
        """The row as one line of JSON, with the hash in hex."""
        values = {name: getattr(self, name) for name in FIELDS} | {"hash": self.hash.hex()}
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        """The row of a line of JSON. Raises ValueError."""
        values = json.loads(line)
        if not isinstance(values, dict) or set(values) != {*FIELDS, "hash"}:
            raise ValueError(f"expected the fields {', '.join((*FIELDS, 'hash'))}")
        for name, value in values.items():
            good = type(value) is int and 0 <= value <= _LARGEST if name in _NUMBERS else isinstance(value, str)
            if not good:
                raise ValueError(f"{name}: expected {'a number' if name in _NUMBERS else 'text'}, got {value!r:.100}")
        return cls(**{**values, "hash": bytes.fromhex(values["hash"])})


def limited(fields: Mapping[str, str]) -> dict[str, Any]:
    """The text fields of a row: of limited length, with escapes in place of characters that cannot be printed."""
    return {name: _cut(fields[name], most) for name, most in _MOST_CHARACTERS.items()}


def _cut(text: str, most: int) -> str:
    shown = escaped(text[:most])
    return shown if len(shown) <= most and len(text) <= most else f"{shown[: most - 3]}..."


MOST_PROBLEMS = 100


class Problem(NamedTuple):
    """A place where the chain is broken."""

    number: int
    """The number of the row that is wrong."""
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
