"""Runs that are in the ledger and that this coordinator cannot use, each with why: for operators to see.

Their ids stay taken, and their clients keep what they hold for them: another configuration may load them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fl_server.errors import NoSuchRun, one_line
from fl_server.store.base import RunRecord


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """One of them."""

    record: RunRecord
    reason: str

    def named(self, section: str) -> str:
        """The name in a section of its spec, "task" or "algorithm"; empty where the spec has none."""
        spec: Any = self.record.spec
        part = spec.get(section) if isinstance(spec, Mapping) else None
        name = part.get("name") if isinstance(part, Mapping) else None
        return one_line(name, 256) if isinstance(name, str) else ""


class NotLoadedRuns:
    """All of them, by id."""

    def __init__(self) -> None:
        self._runs: dict[str, NotLoaded] = {}

    def __contains__(self, run_id: object) -> bool:
        return run_id in self._runs

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def add(self, record: RunRecord, reason: str) -> None:
        """This one cannot be used."""
        self._runs[record.run_id] = NotLoaded(record, one_line(reason))

    def get(self, run_id: str) -> NotLoaded | None:
        """The run of that id, if it is one of them."""
        return self._runs.get(run_id)

    def all(self) -> list[NotLoaded]:
        """All of them, the oldest first."""
        return list(self._runs.values())

    def refuse(self, run_id: str) -> None:
        """Raises NoSuchRun, with why, if the run is one of them."""
        if (found := self._runs.get(run_id)) is not None:
            raise NoSuchRun(run_id, f"run {run_id!r} is in the ledger and not loaded: {found.reason}")
