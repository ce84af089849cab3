"""Outcomes of updates, and which update each client's state is made of: SCAFFOLD's c_i, FedDyn's h_i.

The states lie on the devices. The server keeps their sum, which is right only if every client continues from its
latest update that counted. So each assignment names that update. A client that has lost its state reports it, and all
states restart in the next epoch. How often one client may cause that, and how soon after the last restart, is limited
by `config.StatesConfig`. The limits are checked against the ledger, so a restart changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from fl_server.settings.config import StatesConfig
from fl_server.store.database.store import Store
from fl_server.store.records import ClientStateRecord, UpdateRecord
from protos.codec import digest_message
from protos.fl.v1.training_pb2 import ExchangeKey, Outcome, RefusalReason


def counted_outcome(update: UpdateRecord, state_epoch: int) -> Outcome:
    """The update is part of a committed model."""
    return Outcome(
        key=ExchangeKey(run_id=update.run_id, round=update.round, exchange=update.exchange),
        digest=digest_message(update.digest),
        counted=True,
        clip_factor=update.clip_factor,
        state_epoch=state_epoch,
    )


def uncounted_outcome(key: ExchangeKey, reason: RefusalReason, state_epoch: int) -> Outcome:
    """No update of the client for the key is part of a committed model."""
    return Outcome(key=key, counted=False, clip_factor=1.0, reason=reason, state_epoch=state_epoch)


def refused_outcome(update: UpdateRecord, reason: RefusalReason, state_epoch: int) -> Outcome:
    """This update was accepted and is not part of a committed model."""
    key = ExchangeKey(run_id=update.run_id, round=update.round, exchange=update.exchange)
    outcome = uncounted_outcome(key, reason, state_epoch)
    outcome.digest.CopyFrom(digest_message(update.digest))
    return outcome


def accepted_outcome(update: UpdateRecord, state_epoch: int) -> Outcome:
    """An accepted update of a committed round: part of the model, or left out by the reducer."""
    if update.left_out:
        return refused_outcome(update, RefusalReason.REFUSAL_REASON_LEFT_OUT, state_epoch)
    return counted_outcome(update, state_epoch)


def not_needed_outcome(key: ExchangeKey, state_epoch: int) -> Outcome:
    """The outcome for a client without an accepted update in a committed round."""
    return uncounted_outcome(key, RefusalReason.REFUSAL_REASON_NOT_NEEDED, state_epoch)


@dataclass(frozen=True, slots=True)
class LossReport:
    """A client's report that it has lost its state."""

    client: str
    state_epoch: int
    round: int
    why: str


class ClientStates:
    """The latest update that counted of each client of a run in the current epoch. Lives on the event loop."""

    def __init__(self, run_id: str, rules: StatesConfig, *, summed: bool) -> None:
        """summed: the server keeps the states' sum, so that a lost state means a restart of all states."""
        self._run_id = run_id
        self._rules = rules
        self._summed = summed
        self._counted: dict[str, Outcome] = {}
        self._standings: dict[str, ClientStateRecord] = {}
        self._excused: set[str] = set()
        """Clients that may still report a state lost from before the restart of the states. Such a report is about a
        cancelled assignment and is no fault. Until the next commit."""
        self.missing: frozenset[str] = frozenset()
        """Members that have not taken part for many rounds and cannot be drawn, as of the latest commit."""

    @property
    def members(self) -> Collection[str]:
        """Clients with a state in the server's sum."""
        return self._counted.keys()

    def counted(self, client: str) -> Outcome | None:
        """The outcome of the update that the client's state is made of; None if the state starts at zero."""
        return self._counted.get(client)

    def count(self, updates: Iterable[UpdateRecord], state_epoch: int) -> None:
        """A round was committed with these updates of local training: their clients have new states."""
        self._excused.clear()
        for update in updates:
            self._counted[update.client_id] = counted_outcome(update, state_epoch)

    def restart_one(self, client: str) -> None:
        """Restart the state of one client."""
        self._counted.pop(client, None)
        self._excused.add(client)

    def restart_all(self) -> None:
        """Restart the states of all clients."""
        self._excused = set(self._counted)
        self._counted.clear()
        self.missing = frozenset()

    # Lost states.

    def excused(self, client: str) -> bool:
        """Whether a report of the client may be about a state from before the restart."""
        return client in self._excused

    def use_excuse(self, client: str) -> None:
        """A report was taken as such; the next one is about the client's current work."""
        self._excused.discard(client)

    def after_loss(self, lost: LossReport) -> ClientStateRecord:
        """The client's record after a report of a lost state. A repeated report changes nothing."""
        before = self.standing(lost.client)
        if self._is_lost(before, lost.state_epoch):
            return before
        return replace(
            before, losses=before.losses + 1, lost_epoch=lost.state_epoch, lost_round=lost.round, reason=lost.why
        )

    def standing(self, client: str) -> ClientStateRecord:
        """The client's record of lost states."""
        return self._standings.get(client) or ClientStateRecord(self._run_id, client)

    def keep(self, standings: Iterable[ClientStateRecord]) -> None:
        """Keep records that are in the ledger now."""
        self._standings.update({standing.client_id: standing for standing in standings})

    def release(self, client: str) -> None:
        """An operator lets the client take part again: its losses are counted from zero."""
        if (standing := self._standings.get(client)) is not None:
            self._standings[client] = replace(standing, losses=0)

    def drop(self, client: str) -> None:
        """The client was forgotten."""
        self._standings.pop(client, None)

    @property
    def left_out(self) -> frozenset[str]:
        """Clients that lost their states too often. They take no part in the run until an operator releases them."""
        return frozenset(standing.client_id for standing in self._standings.values() if self.lost_too_often(standing))

    def lost_too_often(self, standing: ClientStateRecord) -> bool:
        """Whether the client is left out of the run."""
        return 0 < self._rules.losses <= standing.losses

    def awaiting_restart(self, state_epoch: int) -> tuple[ClientStateRecord, ...]:
        """Clients with a lost state that is still in the server's sum; after a restart of the coordinator."""
        return tuple(standing for standing in self._standings.values() if self._is_lost(standing, state_epoch))

    def _is_lost(self, standing: ClientStateRecord, state_epoch: int) -> bool:
        """Whether the client has lost the state that is made of its latest update that counted."""
        counted = self._counted.get(standing.client_id)
        return counted is not None and standing.lost_epoch == state_epoch and standing.lost_round > counted.key.round

    # Missing members.

    def rounds_missed(self, rounds: int) -> dict[str, int]:
        """Members by how many of `rounds` committed rounds came after their latest update that counted."""
        return {client: rounds - 1 - counted.key.round for client, counted in self._counted.items()}

    def after_warning(self, client: str, round_: int) -> ClientStateRecord:
        """The client's record after a warning to operators, after a round, that it is missing."""
        return replace(self.standing(client), warned_round=round_)

    def warned(self, client: str) -> bool:
        """Whether operators were warned since the client took part last."""
        counted = self._counted.get(client)
        return counted is not None and self.standing(client).warned_round > counted.key.round

    def restore(self, store: Store, rounds: range, state_epoch: int, population: int = 0) -> None:
        """Read the states from the ledger after a restart; blocking.

        Args:
            store: the ledger.
            rounds: the committed rounds of this epoch. They are read from the newest on, until all clients are found.
            state_epoch: this epoch.
            population: the most clients that can have a state; 0: unknown, so that all rounds are read.
        """
        newest: dict[str, UpdateRecord] = {}
        for round_ in reversed(rounds):
            attempts = store.attempts(self._run_id, round_)
            last = max((attempt.exchange for attempt in attempts), default=0)
            for update in store.accepted_updates(self._run_id, round_, last):
                newest.setdefault(update.client_id, update)
            if 0 < population <= len(newest):
                break
        self.count(sorted(newest.values(), key=lambda update: update.round), state_epoch)
        self.keep(store.client_state_records(self._run_id))
        if not self._summed:
            for standing in self.awaiting_restart(state_epoch):
                self.restart_one(standing.client_id)
