"""Which update each client's state is made of: SCAFFOLD's c_i, FedDyn's h_i.

The states lie on the devices. The server keeps their sum, and that sum is right only if every client goes on from the
update of its that counted last. So it is told with each assignment which one that was; one that has lost its state
says so, and all begin anew in the next epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from fl_server.outcomes import counted_outcome
from fl_server.store.base import CommitRecord, Store, UpdateRecord
from protos.fl.v1.training_pb2 import Outcome


@dataclass(frozen=True, slots=True)
class RoundUpdates:
    """The updates of local training that are part of a committed model."""

    state_epoch: int
    updates: Sequence[UpdateRecord]


class ClientStates:
    """The latest update of each client that counted in the epoch of the moment."""

    def __init__(self) -> None:
        self._counted: dict[str, Outcome] = {}

    @property
    def members(self) -> Collection[str]:
        """Clients whose state is part of the server's sum."""
        return self._counted.keys()

    def of(self, client: str) -> Outcome | None:
        """The outcome that the client's state is made by; None if it starts anew."""
        return self._counted.get(client)

    def count(self, committed: RoundUpdates) -> None:
        """A round was committed: these clients have new states."""
        for update in committed.updates:
            self._counted[update.client_id] = counted_outcome(update, committed.state_epoch)

    def forget(self, client: str) -> None:
        """The client starts anew, for itself alone."""
        self._counted.pop(client, None)

    def restart(self) -> None:
        """All start anew."""
        self._counted.clear()

    def read_back(self, store: Store, commits: Iterable[CommitRecord], state_epoch: int) -> None:
        """From the ledger, after a restart; blocking."""
        for commit in commits:
            if commit.state_epoch == state_epoch:
                self.count(last_exchange(store, commit))


def last_exchange(store: Store, commit: CommitRecord) -> RoundUpdates:
    """The updates that a committed round's local training came to; blocking."""
    exchange = max((attempt.exchange for attempt in store.attempts(commit.run_id, commit.round)), default=0)
    return RoundUpdates(commit.state_epoch, accepted_updates(store, commit, exchange))


def accepted_updates(store: Store, commit: CommitRecord, exchange: int) -> list[UpdateRecord]:
    """The updates that an exchange of a committed round accepted, in the order of client id bytes; blocking."""
    fixed = set(store.accepted(commit.run_id, commit.round, exchange) or ())
    updates = store.updates(commit.run_id, commit.round, exchange)
    return [update for update in updates if (update.client_id, update.digest) in fixed]
