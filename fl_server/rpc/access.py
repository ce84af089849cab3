"""Who may see and change what: the owners of runs, and the fewest updates of a model.

An operator sees and changes its own runs and those without an owner. A viewer sees all, an admin sees and changes all.
Where callers have no identity, every run is everybody's. A run that the caller may not see is unknown to it: the answer
is the same as for an id that never existed.

A model that was made of one update is that update; of two, each of the two clients can compute the other's. An operator
who is no admin gets no such model: not by the run's settings, and not by an export.
"""

from __future__ import annotations

from fl_server.errors import Forbidden, InvalidInput, NoSuchRun, TooFewUpdates
from fl_server.identity import ANYBODY, Identity, caller
from fl_server.run.run import Run
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.privacy import hides_cohorts
from fl_server.run_settings.spec import from_values
from fl_server.runs.coordinator import Coordinator
from fl_server.runs.table import NotLoaded
from fl_server.services import Services
from fl_server.settings.config import RoundsConfig
from fl_server.store.client_work import HIDDEN_RUN
from fl_server.store.records import CommitRecord, HistoryRecord

HIDDEN = HIDDEN_RUN
"""Stands for the id of a run that the caller may not see."""
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
        return [run for run in self._coordinator.runs() if sees(run.config.owner)]

    def not_loaded(self) -> list[NotLoaded]:
        """Those that this coordinator could not load, the oldest first."""
        return [run for run in self._coordinator.table.not_loaded.values() if sees(run.owner)]

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
        require_owner(self._owner(run_id))

    def hides(self, run_id: str) -> bool:
        """Whether there is or was such a run, and the caller may not see it. Nobody owns a deleted run."""
        if self.all_seen:
            return False
        return run_id in self._coordinator.creation.deleted_ids or not sees(self._owner(run_id))

    def hides_cohorts(self, run_id: str) -> bool:
        """Whether nobody may see who, and how many, take part in the run's rounds."""
        table = self._coordinator.table
        if (run := table.loaded.get(run_id)) is not None:
            return run.context.hides_cohorts
        problem = table.not_loaded.get(run_id)
        return problem is not None and hides_cohorts(problem.record.spec)

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


class OperatorCalls:
    """What the parts of the Admin service share: the services, and the runs as the caller may see them."""

    def __init__(self, services: Services, coordinator: Coordinator) -> None:
        self._services, self._coordinator = services, coordinator
        self._runs = OwnedRuns(coordinator)


def require_owner(owner: str | None) -> None:
    """Raises Forbidden if the caller may not change what belongs to this operator's run. None or empty: nobody's."""
    who = caller.get()
    if owner and who is not ANYBODY and owner != who.name and not _has(who, _CHANGE_ALL):
        raise Forbidden(str(who), f"the owner of the run, {owner}, or the role admin", ("admin",))


def _has(who: Identity, roles: frozenset[str]) -> bool:
    """Whether the caller has one of the roles, or callers have no identity here."""
    return who is ANYBODY or not roles.isdisjoint(who.roles)


def sees(owner: str | None) -> bool:
    """Whether the caller sees what belongs to this operator's run. None or empty: nobody's."""
    who = caller.get()
    return not owner or owner == who.name or _has(who, _SEE_ALL)


def least_accepted(rules: RoundsConfig) -> int:
    """The fewest updates for the caller. An admin, and a caller where nobody has an identity, has no floor."""
    who = caller.get()
    return 1 if who is ANYBODY or "admin" in who.roles else rules.min_accepted


def with_floor(config: RunConfig, rules: RoundsConfig) -> RunConfig:
    """The configuration of a new run with the caller's floor. Raises InvalidInput if it contradicts the settings."""
    least, own = least_accepted(rules), config.round.min_accepted
    if config.client_privacy is not None:
        return config  # noise protects the clients of a small cohort
    if least == 1 or (own is not None and own >= least):
        return config
    if own is not None:
        expected = f"at least {least} for a run of an operator who is no admin (rounds.min_accepted of the coordinator)"
        raise InvalidInput("round.min_accepted", expected, own)
    values = config.model_dump(exclude_none=True)
    return from_values({**values, "round": {**values["round"], "min_accepted": least}})


def check_export(run_id: str, commit: CommitRecord | None, rules: RoundsConfig) -> None:
    """Raises TooFewUpdates if the caller may not have the model of a round. commit: None for the first model."""
    least = least_accepted(rules)
    if commit is not None and commit.accepted < least:
        raise TooFewUpdates(run_id, commit.round, commit.accepted, least)
