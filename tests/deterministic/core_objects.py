"""An object store beside the core's ledger: keys that are written once, rows that refer to them, removals in two steps.

An update is put under a key that no other process uses, and counts when its row is written with that key. What counts
no more is written as a removal first, and removed later. A former leader can put and remove as before: the store checks
nothing. It does no harm, because nothing refers to what it puts, and what it removes was to be removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from fl_server.rounds import effects as fx
from tests.deterministic.core_driver import Driver
from tests.deterministic.core_ledger import Ledger, Place


@dataclass
class ObjectRules:
    """How the store is used. Other values are planted faults."""

    own_keys: bool = True
    """Whether a key has the opening of the ledger and a count."""
    object_first: bool = True
    """Whether an object is put before the row that refers to it."""
    removal_first: bool = True
    """Whether a removal is written before it is done."""


@dataclass
class Objects:
    """The store."""

    rules: ObjectRules = field(default_factory=ObjectRules)
    there: dict[str, bytes] = field(default_factory=dict)
    removed: int = 0

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        assert self.there.get(key, data) == data, f"objects are written once: {key} has other bytes"
        self.there[key] = data

    def remove(self, keys: list[str]) -> None:
        """Remove objects."""
        for key in keys:
            self.removed += self.there.pop(key, None) is not None


def check_objects(ledger: Ledger, objects: Objects) -> None:
    """Every row has its object, with its own bytes."""
    for (round_, exchange, client), key in ledger.objects.items():
        made = ledger.updates[round_, exchange][client]
        assert objects.there.get(key) == made, f"the object of each counted update is there: not {key}"


class StoredDriver(Driver):
    """A process whose updates are in an object store."""

    def __init__(self, *parts: Any, objects: Objects, opening: int) -> None:
        super().__init__(*parts)
        self._objects, self._opening, self._counts = objects, opening, count()

    def restore(self, present: frozenset[str]) -> Iterator[str]:
        """See Driver. Removals that are written go on."""
        yield from super().restore(present)
        self._remove_later()

    def admit(self, client: str, place: Place, made: bytes) -> Iterator[str]:
        """See Driver."""
        key = "/".join(map(str, (*place, client)))
        if self._objects.rules.own_keys:
            key += f".{self._opening}-{next(self._counts)}"
        if self._objects.rules.object_first:
            self._objects.put(key, made)
            yield "object put"
        for step in super().admit(client, place, made):
            if step == "update: write":
                self.ledger.objects[*place, client] = key
            yield step
        if not self._objects.rules.object_first:
            self._objects.put(key, made)

    def write(self, effect: fx.Effect) -> bool:
        """See Effects. The objects of rows that are gone count no more."""
        written = super().write(effect)
        self._forget({row for row in self.ledger.objects if row[2] not in self.ledger.updates.get(row[:2], {})})
        return written

    def finish(self, work: str) -> Iterator[str]:
        """See Driver. After a commit the objects of its round count no more."""
        if work == "remove":
            yield from self._remove()
            return
        for step in super().finish(work):
            if step == "commit written" and not self.state.policy.buffered:
                done = len(self.ledger.commits)
                self._forget({row for row in self.ledger.objects if row[0] < done})
            yield step

    def _forget(self, rows: set[tuple[int, int, str]]) -> None:
        keys = [self.ledger.objects.pop(row) for row in sorted(rows)]
        if not self._objects.rules.removal_first:
            self._objects.remove(keys)
        elif keys:
            self.ledger.removals += keys
            self._remove_later()

    def _remove_later(self) -> None:
        if self.ledger.removals and "remove" not in self.work:
            self.work.append("remove")

    def _remove(self) -> Iterator[str]:
        keys = list(self.ledger.removals)
        yield "removals read"
        self._objects.remove(keys)
        yield "objects removed"
        self.ledger.removals = [key for key in self.ledger.removals if key not in keys]
        yield "removals written"
