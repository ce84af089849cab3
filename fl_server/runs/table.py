"""The table of a coordinator's runs: those that are loaded, and those that cannot be, with the reason for operators.

The ids of the latter stay taken, and their clients keep what they hold for them: another configuration may load them
again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fl_server.errors import NoSuchRun, one_line
from fl_server.run.run import Run
from fl_server.store.records import RunRecord


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """One run, and why it is not loaded."""

    record: RunRecord
    reason: str
    loading: bool = False
    """Whether it is being loaded."""

    @property
    def state(self) -> str:
        """The state to show, as `RunRecord.state`: only of a run whose code failed. Empty: it may be loaded again."""
        return self.record.state if self.record.load_failure and not self.loading else ""

    @property
    def explained(self) -> str:
        """The reason to show."""
        if not self.state:
            return one_line(f"not loaded: {self.reason}")
        return one_line(f"{self.reason}; `fl run resume {self.record.run_id}` loads it again")

    def named(self, section: str) -> str:
        """The name in a section of its spec, "task" or "algorithm"; empty where the spec has none."""
        spec: Any = self.record.spec
        part = spec.get(section) if isinstance(spec, Mapping) else None
        name = part.get("name") if isinstance(part, Mapping) else None
        return one_line(name, 256) if isinstance(name, str) else ""

    @property
    def owner(self) -> str | None:
        """The owner in its spec, which may be unreadable otherwise; None where there is none."""
        spec: Any = self.record.spec
        owner = spec.get("owner") if isinstance(spec, Mapping) else None
        return owner if isinstance(owner, str) else None


class NotLoadedRuns:
    """All runs that are not loaded, by id."""

    def __init__(self) -> None:
        self._runs: dict[str, NotLoaded] = {}

    def __contains__(self, run_id: object) -> bool:
        return run_id in self._runs

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def add(self, record: RunRecord, reason: str, *, loading: bool = False) -> None:
        """Add a run, or change its reason. loading: it is being loaded."""
        self._runs[record.run_id] = NotLoaded(record, one_line(reason), loading)

    def remove(self, run_id: str) -> None:
        """The run was deleted or loaded."""
        self._runs.pop(run_id, None)

    def get(self, run_id: str) -> NotLoaded | None:
        """The run with that id, if it is not loaded."""
        return self._runs.get(run_id)

    def all(self) -> list[NotLoaded]:
        """All runs, oldest first."""
        return list(self._runs.values())

    def refuse(self, run_id: str) -> None:
        """Raises NoSuchRun, with the reason, if the run is not loaded."""
        if (found := self._runs.get(run_id)) is not None:
            raise NoSuchRun(run_id, f"run {run_id!r} is in the ledger and not loaded: {found.reason}")


class RunTable:
    """Every run of the ledger that is not deleted, by id. Used on the event loop."""

    def __init__(self) -> None:
        self.loaded: dict[str, Run] = {}
        self.not_loaded = NotLoadedRuns()

    def add(self, run: Run) -> None:
        """Add a run in its place: the table is in the order of creation."""
        self.not_loaded.remove(run.id)
        self.loaded[run.id] = run
        self.loaded = dict(sorted(self.loaded.items(), key=lambda each: (each[1].record.created_at, each[0])))

    def is_over(self, run_id: str) -> bool:
        """Whether no client works for the run any more: it has ended, or is unknown to this coordinator."""
        run = self.loaded.get(run_id)
        return run_id not in self.not_loaded and (run is None or run.ended)

    def require(self, run: Run) -> None:
        """Raises NoSuchRun if the run was deleted while the caller waited for its turn."""
        if self.loaded.get(run.id) is not run:
            raise NoSuchRun(run.id)
