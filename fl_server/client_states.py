"""Which update each client's state is made of: SCAFFOLD's c_i, FedDyn's h_i.

The states lie on the devices. The server keeps their sum, and that sum is right only if every client goes on from the
update of its that counted last. So it is told with each assignment which one that was; one that has lost its state
says so, and all begin anew in the next epoch. How often one client may do that, and how soon after the last time, has
limits (`config.StatesConfig`); what they look at is in the ledger, so that a restart changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fl_server.config import StatesConfig
from fl_server.outcomes import counted_outcome
from fl_server.store.base import CommitRecord, StateStanding, Store, UpdateRecord
from protos.fl.v1.training_pb2 import Outcome


@dataclass(frozen=True, slots=True)
class RoundUpdates:
    """The updates of local training that are part of a committed model."""

    state_epoch: int
    updates: Sequence[UpdateRecord]


@dataclass(frozen=True, slots=True)
class Lost:
    """One report of a lost state."""

    client: str
    state_epoch: int
    round: int
    why: str


class ClientStates:
    """The latest update of each client of one run that counted in the epoch of the moment. Lives on the event loop."""

    def __init__(self, run_id: str, rules: StatesConfig, *, summed: bool) -> None:
        """summed: the server keeps the states' sum, so that a lost one means a restart of all."""
        self._run_id = run_id
        self._rules = rules
        self._summed = summed
        self._counted: dict[str, Outcome] = {}
        self._standings: dict[str, StateStanding] = {}
        self._may_cross: set[str] = set()
        """Clients whose report of a lost state may have crossed the restart of the states: it means an assignment that
        was cancelled, so it is nobody's fault. Until the next commit."""
        self.missing: frozenset[str] = frozenset()
        """Members that have not taken part for many rounds and cannot be drawn, as of the latest commit."""

    @property
    def members(self) -> Collection[str]:
        """Clients whose state is part of the server's sum."""
        return self._counted.keys()

    def of(self, client: str) -> Outcome | None:
        """The outcome that the client's state is made by; None if it starts anew."""
        return self._counted.get(client)

    def count(self, committed: RoundUpdates) -> None:
        """A round was committed: these clients have new states."""
        self._may_cross.clear()
        for update in committed.updates:
            self._counted[update.client_id] = counted_outcome(update, committed.state_epoch)

    def forget(self, client: str) -> None:
        """The client starts anew, for itself alone."""
        self._counted.pop(client, None)
        self._may_cross.add(client)

    def restart(self) -> None:
        """All start anew."""
        self._may_cross = set(self._counted)
        self._counted.clear()
        self.missing = frozenset()

    # Lost states.

    def may_cross(self, client: str) -> bool:
        """Whether a report of the client may be about a state of before the restart."""
        return client in self._may_cross

    def has_crossed(self, client: str) -> None:
        """It was taken as that; the next one is about the work that the client has now."""
        self._may_cross.discard(client)

    def lost(self, lost: Lost) -> StateStanding:
        """What is to be entered for a report of a lost state; a repeat changes nothing."""
        before = self.standing(lost.client)
        if self._is_lost(before, lost.state_epoch):
            return before
        return replace(
            before, losses=before.losses + 1, lost_epoch=lost.state_epoch, lost_round=lost.round, reason=lost.why
        )

    def standing(self, client: str) -> StateStanding:
        """What is known of the client's state."""
        return self._standings.get(client) or StateStanding(self._run_id, client)

    def keep(self, standings: Iterable[StateStanding]) -> None:
        """These are in the ledger now."""
        self._standings.update({standing.client_id: standing for standing in standings})

    def release(self, client: str) -> None:
        """An operator lets the client take part again, and its losses are counted from zero."""
        if (standing := self._standings.get(client)) is not None:
            self._standings[client] = replace(standing, losses=0)

    def drop(self, client: str) -> None:
        """The client was forgotten."""
        self._standings.pop(client, None)

    @property
    def left_out(self) -> frozenset[str]:
        """Clients that take no part in the run until an operator releases them: they lost their states too often."""
        return frozenset(each.client_id for each in self._standings.values() if self.too_often(each))

    def too_often(self, standing: StateStanding) -> bool:
        """Whether that is reason enough to leave the client out of the run."""
        return 0 < self._rules.losses <= standing.losses

    def waiting(self, state_epoch: int) -> tuple[StateStanding, ...]:
        """Whose state is lost while its sum still has it: until the states restart."""
        return tuple(each for each in self._standings.values() if self._is_lost(each, state_epoch))

    def kept_out(self, state_epoch: int) -> frozenset[str]:
        """Clients that must not be drawn now."""
        return self.left_out | {each.client_id for each in self.waiting(state_epoch)}

    def may_restart(self, commits: Mapping[int, CommitRecord], state_epoch: int) -> bool:
        """Whether enough rounds were committed since the states began, for a restart because of a lost one."""
        if not state_epoch:
            return True
        done, wanted = len(commits), self._rules.rounds_between_restarts
        newest = (commits[round_] for round_ in range(max(0, done - wanted), done))
        return done >= wanted and all(commit.state_epoch == state_epoch for commit in newest)

    def _is_lost(self, standing: StateStanding, state_epoch: int) -> bool:
        """Whether it is the state by the update that counted last which the client has lost."""
        counted = self._counted.get(standing.client_id)
        return counted is not None and standing.lost_epoch == state_epoch and standing.lost_round > counted.key.round

    # Missing members.

    def missed(self, rounds: int) -> dict[str, int]:
        """Members by how many of `rounds` committed rounds came after their last that counted."""
        return {client: rounds - 1 - counted.key.round for client, counted in self._counted.items()}

    def warn(self, client: str, round_: int) -> StateStanding:
        """What is to be entered when operators are warned that the client is missing, behind a round."""
        return replace(self.standing(client), warned_round=round_)

    def warned(self, client: str) -> bool:
        """Whether operators were warned since the client took part last."""
        counted = self._counted.get(client)
        return counted is not None and self.standing(client).warned_round > counted.key.round

    def read_back(self, store: Store, commits: Iterable[CommitRecord], state_epoch: int) -> None:
        """From the ledger, after a restart; blocking."""
        for commit in commits:
            if commit.state_epoch == state_epoch:
                self.count(last_exchange(store, commit))
        self.keep(store.state_standings(self._run_id))
        if not self._summed:
            for standing in self.waiting(state_epoch):
                self.forget(standing.client_id)


def last_exchange(store: Store, commit: CommitRecord) -> RoundUpdates:
    """The updates that a committed round's local training came to; blocking."""
    exchange = max((attempt.exchange for attempt in store.attempts(commit.run_id, commit.round)), default=0)
    return RoundUpdates(commit.state_epoch, accepted_updates(store, commit, exchange))


def accepted_updates(store: Store, commit: CommitRecord, exchange: int) -> list[UpdateRecord]:
    """The updates that an exchange of a committed round accepted, in the order of client id bytes; blocking."""
    fixed = set(store.accepted(commit.run_id, commit.round, exchange) or ())
    updates = store.updates(commit.run_id, commit.round, exchange)
    return [update for update in updates if (update.client_id, update.digest) in fixed]
