"""Owners of runs: which runs the caller of the current call sees, and which it may change.

An operator sees and changes its own runs and those without an owner. A viewer sees all, an admin sees and changes all.
Where callers have no identity, every run is everybody's. A run that the caller may not see is unknown to it: the answer
is the same as for an id that never existed.
"""

from __future__ import annotations

from fl_server.errors import Forbidden, NoSuchRun
from fl_server.identity import ANYBODY, Identity, caller
from fl_server.run.run import Run
from fl_server.run_config import RunConfig
from fl_server.runs.coordinator import Coordinator
from fl_server.runs.table import NotLoaded
from fl_server.store.records import HistoryRecord

HIDDEN = "-"
"""In place of the id of a run that the caller may not see; no run has this id."""
_SEE_ALL, _CHANGE_ALL = frozenset({"viewer", "admin"}), frozenset({"admin"})


def with_owner(config: RunConfig) -> RunConfig:
    """The configuration of a new run with its owner, by default the caller. Raises Forbidden for another name."""
    who = caller.get()
    if who is ANYBODY:
        return config
    if config.owner is None:
        return config.model_copy(update={"owner": who.name})
    if config.owner != who.name and not _has(who, _CHANGE_ALL):
        raise Forbidden(str(who), f"owner = {who.name!r} or none, or the role admin", ("admin",))
    return config


class OwnedRuns:
    """All runs of a coordinator, as the caller of the current call may see them."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @property
    def all_seen(self) -> bool:
        """Whether the caller sees every run."""
        return _has(caller.get(), _SEE_ALL)

    def loaded(self) -> list[Run]:
        """The runs that the caller sees, the oldest first."""
        return [run for run in self._coordinator.runs() if _sees(run.config.owner)]

    def not_loaded(self) -> list[NotLoaded]:
        """Those that this coordinator could not load, the oldest first."""
        return [run for run in self._coordinator.table.not_loaded.all() if _sees(run.owner)]

    def get(self, run_id: str) -> Run:
        """A run that the caller sees. Raises NoSuchRun."""
        if self.hides(run_id):
            raise NoSuchRun(run_id)
        return self._coordinator.run(run_id)

    def problem(self, run_id: str) -> NotLoaded | None:
        """A run that this coordinator could not load, if the caller sees it."""
        return None if self.hides(run_id) else self._coordinator.table.not_loaded.get(run_id)

    def to_change(self, run_id: str) -> Run:
        """A run that the caller may change. Raises NoSuchRun, Forbidden."""
        self.require_change(run_id)
        return self._coordinator.run(run_id)

    def require_change(self, run_id: str) -> None:
        """Raises NoSuchRun for a run that the caller does not see, and Forbidden for one that it only sees."""
        if self.hides(run_id):
            raise NoSuchRun(run_id)
        who, owner = caller.get(), self._owner(run_id)
        if owner and who is not ANYBODY and owner != who.name and not _has(who, _CHANGE_ALL):
            raise Forbidden(str(who), f"the owner of the run, {owner}, or the role admin", ("admin",))

    def hides(self, run_id: str) -> bool:
        """Whether there is or was such a run, and the caller may not see it. Nobody owns a deleted run."""
        if self.all_seen:
            return False
        return run_id in self._coordinator.creation.deleted_ids or not _sees(self._owner(run_id))

    def hides_entry(self, entry: HistoryRecord) -> bool:
        """Whether the caller may not see a row of the history: of a hidden run, or of one that was never created."""
        if entry.event == "run_refused":
            return not self.all_seen and entry.actor != str(caller.get())
        return self.hides(entry.subject)

    def _owner(self, run_id: str) -> str | None:
        table = self._coordinator.table
        if (run := table.loaded.get(run_id)) is not None:
            return run.config.owner
        problem = table.not_loaded.get(run_id)
        return None if problem is None else problem.owner


def _has(who: Identity, roles: frozenset[str]) -> bool:
    """Whether the caller has one of the roles, or callers have no identity here."""
    return who is ANYBODY or not roles.isdisjoint(who.roles)


def _sees(owner: str | None) -> bool:
    who = caller.get()
    return not owner or owner == who.name or _has(who, _SEE_ALL)
