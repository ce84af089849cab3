"""What this device keeps between rounds: updates until their outcome is known, and the client states they leave.

A client state moves in two steps. With the update the state that it would leave is put on disk before the update is
sent; when the update has counted, that state is promoted: written as the run's state, and then the update's file goes.
Each step is one rename or one unlink, and doing it again changes nothing, so that a process may die between any two.
Anything else that is heard of an update drops it, and the run's state stays as it was.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from algorithms.base import Memory
from fl_client.client_states import ClientState, ClientStates
from fl_client.errors import WorkFailed
from fl_client.next_state import NextState
from fl_client.storage.room import ROOM, Room
from fl_client.updates import Head, Key, Outgoing, PendingUpdates, Update, key_of, work_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2

log = structlog.get_logger()


class Shelf:
    """Pending updates and client states together. Blocking; one call at a time."""

    def __init__(self, pending: Path, states: Path, room: Room = ROOM) -> None:
        self._pending = PendingUpdates(pending)
        self._states = ClientStates(states)
        self._room = room

    def resume(self, assignment: training_pb2.Assignment) -> Outgoing | None:
        """The update that was made for exactly this work before; first, all that the assignment decides is settled.

        Raises OSError when a state that counted cannot be written.
        """
        if assignment.HasField("counted"):
            self.settle(assignment.counted)
        for key in self._keys(assignment.key.run_id):
            if key[1] < assignment.key.round:
                self._pending.drop(key)  # rounds come one after the other: what has not counted by now never will
        return self._pending.find(key_of(assignment.key), work_of(assignment))

    def state_for(self, assignment: training_pb2.Assignment) -> Memory | None:
        """The client state to work from, once `resume` was called; None: the method's initial one.

        Raises:
            WorkFailed: the state that the assignment asks for is not here.
        """
        run_id = assignment.key.run_id
        if not assignment.HasField("counted"):
            self._states.drop(run_id)  # whatever it was, it is void
            return None
        state, wanted = self._states.find(run_id), _of_epoch(assignment.counted, assignment.state_epoch)
        if state is None or _identity(state.left_by) != _identity(wanted):
            raise WorkFailed(
                pb.FAILURE_REASON_STATE_LOST,
                f"expected the client state that {_words(wanted)} left, got"
                f" {'none' if state is None else 'that of ' + _words(state.left_by)}: is the state directory another's,"
                " or an old copy? The coordinator decides how the run goes on",
            )
        return state.memory

    def check_room(self, run_id: str) -> None:
        """Raises WorkFailed unless a client state of this run may be kept beside those that are kept."""
        runs = {state.run_id for state in self.held()}
        self._room.check_runs(len(runs | {run_id}))
        self._room.check_bytes(self._bytes())

    def keep(self, update: Update, next_state: NextState | None) -> Outgoing:
        """Keep an update, and the state that it would leave, until its outcome; as it goes up.

        Raises:
            OSError: the disk does not take it.
            WorkFailed: it leaves a state, and there may be no more of them.
        """
        if next_state is not None:
            self.check_room(update.header.key.run_id)
            self._room.check_bytes(self._bytes() + update.header.size_bytes + next_state.size_bytes)
            self._forget_oldest(update.header.key.run_id)
        return self._pending.put(update, next_state)

    def _bytes(self) -> int:
        """On disk, of states and of the updates that leave them."""
        return self._states.size_bytes() + sum(head.path.stat().st_size for head in self._stateful())

    def _stateful(self, run_id: str | None = None) -> list[Head]:
        """The updates that leave a state, of a run or of all, oldest first."""
        return [head for head in self._pending.heads() if head.has_state and run_id in (None, head.header.key.run_id)]

    def _forget_oldest(self, run_id: str) -> None:
        """A run has one round at a time, so of many updates only the latest can still count."""
        for head in self._stateful(run_id)[: -self._room.updates]:
            key = key_of(head.header.key)
            log.warning("update_given_up", run=run_id, round=key[1], todo="the run has newer ones")
            self._pending.drop(key)

    def settle(self, outcome: training_pb2.Outcome) -> None:
        """What became of an update: the state that it leaves is promoted if it counted, and the update goes.

        Raises OSError when a state that counted cannot be written; the update then stays, to be settled again.
        """
        key = key_of(outcome.key)
        head = self._pending.head(key)
        if head is not None and head.has_state and outcome.counted and head.header.digest == outcome.digest:
            self._promote(head, outcome)
        for run_id, round_, exchange in self._keys(key[0]):
            if round_ == key[1] and exchange < key[2]:
                self._pending.drop((run_id, round_, exchange))  # a round's earlier exchanges are over with it
        self._pending.drop(key)

    def drop(self, key: Key) -> None:
        """Forget an update that will never count."""
        self._pending.drop(key)

    def end(self, run_id: str) -> None:
        """A run is over: nothing that is kept for it is needed any more."""
        self._states.drop(run_id)
        for key in self._keys(run_id):
            self._pending.drop(key)
        self._pending.forget_spare()

    def unsettled(self) -> list[training_pb2.ExchangeKey]:
        """Keys of the updates whose outcome has not been heard, oldest first."""
        return self._pending.unsettled()

    def held(self) -> list[pb.HeldState]:
        """The runs that a state is kept for, or an update that may leave one, with the epoch."""
        held = {state.run_id: state for state in self._states.held()}
        for head in self._pending.heads():
            if head.has_state:
                run_id = head.header.key.run_id
                held.setdefault(run_id, pb.HeldState(run_id=run_id, state_epoch=head.header.state_epoch))
        return list(held.values())

    def _keys(self, run_id: str) -> list[Key]:
        """Keys of a run's pending updates."""
        return [key_of(key) for key in self._pending.unsettled() if key.run_id == run_id]

    def _promote(self, head: Head, outcome: training_pb2.Outcome) -> None:
        """Make the state that an update leaves the run's state, unless that is as new or newer."""
        left_by, run_id = _of_epoch(outcome, head.header.state_epoch), outcome.key.run_id
        here = self._states.left_by(run_id)
        if here is not None and _age(here) >= _age(left_by):
            return
        next_state = self._pending.next_state(key_of(outcome.key))
        if next_state is None:
            log.error("state_unreadable", run=run_id, round=outcome.key.round, todo="it is taken for lost")
            return
        self._states.put(ClientState(left_by, next_state.at(outcome.clip_factor)))
        log.info("state_kept", run=run_id, round=outcome.key.round, clip_factor=round(outcome.clip_factor, 5))


def _of_epoch(outcome: training_pb2.Outcome, epoch: int) -> training_pb2.Outcome:
    """The outcome of an update as the name of the state that it left in an epoch."""
    left_by = training_pb2.Outcome()
    left_by.CopyFrom(outcome)
    left_by.state_epoch = epoch
    return left_by


def _age(left_by: training_pb2.Outcome) -> tuple[int, int]:
    return left_by.state_epoch, left_by.key.round


def _identity(left_by: training_pb2.Outcome) -> tuple[Key, bytes, int]:
    """What tells a client state from all others."""
    return key_of(left_by.key), left_by.digest.value, left_by.state_epoch


def _words(left_by: training_pb2.Outcome) -> str:
    digest = left_by.digest.value.hex()[:16]
    return f"update {digest} of round {left_by.key.round} in epoch {left_by.state_epoch} of run {left_by.key.run_id}"
