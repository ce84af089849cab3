"""The files that this device keeps between rounds: pending updates, and client states.

A client state is replaced in two steps. The next state is written with the update, before the update is sent. When the
update has counted, the next state is promoted: written as the run's state, and then the update's file is removed.
Each step is one rename or one unlink and can be repeated without effect, so the process may die between any two.
Every other outcome removes the update and leaves the run's state as it was.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from algorithms.base import Memory
from fl_client.errors import state_lost
from fl_client.storage.client_state_store import ClientStateStore, NextState, StoredState
from fl_client.storage.disk import DEFAULT_LIMITS, StorageLimits
from fl_client.storage.pending_updates import (
    Key,
    PendingUpdate,
    PendingUpdates,
    Update,
    UpdateFile,
    key_of,
    work_digest,
)
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2

log = structlog.get_logger()


class DeviceStorage:
    """Pending updates and client states together. Blocking, one call at a time."""

    def __init__(self, pending: Path, states: Path, limits: StorageLimits = DEFAULT_LIMITS) -> None:
        self._pending = PendingUpdates(pending)
        self._states = ClientStateStore(states)
        self._limits = limits

    def resume(self, assignment: training_pb2.Assignment) -> PendingUpdate | None:
        """The update saved for exactly this work. First settles all earlier updates that the assignment decides.

        Raises OSError when a state that counted cannot be written.
        """
        self._bind(assignment)
        if assignment.HasField("counted"):
            self.settle(assignment.counted)
        for key in self._keys(assignment.key.run_id):
            if key[1] < assignment.key.round:
                self._pending.drop(key)  # an earlier round is over: its update can no longer count
        return self._pending.find(key_of(assignment.key), work_digest(assignment))

    def state_for(self, assignment: training_pb2.Assignment) -> Memory | None:
        """The client state to train from, after `resume`. None: the method's initial one.

        Raises:
            WorkFailed: the state that the assignment names is not on this device.
        """
        run_id = assignment.key.run_id
        if not assignment.HasField("counted"):
            self._states.drop(run_id)  # the coordinator knows of no update that counted: a state here is void
            return None
        state, wanted = self._states.find(run_id), _of_epoch(assignment.counted, assignment.state_epoch)
        if state is None or _identity(state.created_by) != _identity(wanted):
            raise state_lost(
                f"expected the client state of {_description(wanted)}, got"
                f" {'none' if state is None else 'that of ' + _description(state.created_by)}: is the state directory"
                " of another device, or an old copy? The coordinator decides how the run continues"
            )
        return state.memory

    def latest_state(self, assignment: training_pb2.EvaluationAssignment) -> Memory | None:
        """The client state after this device's last update that counted, as far as it knows. None: there is none."""
        run_id = assignment.key.run_id
        if self._states.data_of(run_id) != assignment.data:
            return None
        state = self._states.find(run_id)
        return None if state is None else state.memory

    def _bind(self, assignment: training_pb2.Assignment) -> None:
        """Drop the run's files if they were made with other data: where the device's settings have changed."""
        run_id = assignment.key.run_id
        if (before := self._states.data_of(run_id)) != assignment.data:
            if self.has(run_id):
                log.warning("data_changed", run=run_id, before=before, now=assignment.data, todo="its state is lost")
            self._drop_all(run_id)
            self._states.set_data(run_id, assignment.data)

    def has(self, run_id: str) -> bool:
        """Whether there is a state or an update of the run."""
        return self._states.created_by(run_id) is not None or bool(self._keys(run_id))

    def _drop_all(self, run_id: str) -> None:
        self._states.drop(run_id)
        for key in self._keys(run_id):
            self._pending.drop(key)

    def check_limits(self, run_id: str) -> None:
        """Raises WorkFailed if a client state of this run would exceed the owner's limits."""
        runs = {state.run_id for state in self.held_states()}
        self._limits.check_runs(len(runs | {run_id}))
        self._limits.check_bytes(self._bytes())

    def save(self, update: Update, next_state: NextState | None) -> PendingUpdate:
        """Save an update, and the next client state, until its outcome. Returns the update to send.

        Raises:
            OSError: the disk is full or cannot be written.
            WorkFailed: a next state would exceed the owner's limits.
        """
        if next_state is not None:
            self.check_limits(update.header.key.run_id)
            self._limits.check_bytes(self._bytes() + update.header.size_bytes + next_state.size_bytes)
            self._drop_oldest(update.header.key.run_id)
        return self._pending.put(update, next_state)

    def _bytes(self) -> int:
        """Bytes on disk of states, and of updates with a next state."""
        return self._states.size_bytes() + sum(file.path.stat().st_size for file in self._with_state())

    def _with_state(self, run_id: str | None = None) -> list[UpdateFile]:
        """The updates with a next state, of a run or of all, oldest first."""
        return [file for file in self._pending.files() if file.has_state and run_id in (None, file.header.key.run_id)]

    def _drop_oldest(self, run_id: str) -> None:
        """A run has one round at a time, so only the latest of many updates can still count."""
        for file in self._with_state(run_id)[: -self._limits.updates]:
            key = key_of(file.header.key)
            log.warning("update_given_up", run=run_id, round=key[1], todo="the run has newer ones")
            self._pending.drop(key)

    def settle(self, outcome: training_pb2.Outcome) -> None:
        """Handle an outcome: the next state is promoted if the update counted, and the update is removed.

        Raises OSError when a state that counted cannot be written. The update then stays, to be settled again.
        """
        key = key_of(outcome.key)
        file = self._pending.file(key)
        if file is not None and file.has_state and outcome.counted and file.header.digest == outcome.digest:
            self._promote(file, outcome)
        for run_id, round_, exchange in self._keys(key[0]):
            if round_ == key[1] and exchange < key[2]:
                self._pending.drop((run_id, round_, exchange))  # a round's earlier exchanges are over with it
        self._pending.drop(key)

    def drop(self, key: Key) -> None:
        """Remove an update that cannot count."""
        self._pending.drop(key)

    def end_run(self, run_id: str) -> None:
        """Remove all files of a run that has ended."""
        self._drop_all(run_id)
        self._states.set_data(run_id, "")
        self._pending.remove_spare()

    def pending_keys(self) -> list[training_pb2.ExchangeKey]:
        """Keys of the updates with an unknown outcome, oldest first."""
        return self._pending.exchange_keys()

    def held_states(self) -> list[pb.HeldState]:
        """The runs with a client state or an update that may create one, with the epoch."""
        held = {state.run_id: state for state in self._states.held()}
        for file in self._pending.files():
            if file.has_state:
                run_id = file.header.key.run_id
                held.setdefault(run_id, pb.HeldState(run_id=run_id, state_epoch=file.header.state_epoch))
        return list(held.values())

    def _keys(self, run_id: str) -> list[Key]:
        """Keys of a run's pending updates."""
        return [key_of(key) for key in self._pending.exchange_keys() if key.run_id == run_id]

    def _promote(self, file: UpdateFile, outcome: training_pb2.Outcome) -> None:
        """Make an update's next state the run's state, unless that is as new or newer."""
        created_by, run_id = _of_epoch(outcome, file.header.state_epoch), outcome.key.run_id
        current = self._states.created_by(run_id)
        if current is not None and _age(current) >= _age(created_by):
            return
        next_state = self._pending.next_state(key_of(outcome.key))
        if next_state is None:
            log.error("state_unreadable", run=run_id, round=outcome.key.round, todo="it counts as lost")
            return
        self._states.put(StoredState(created_by, next_state.at(outcome.clip_factor)))
        log.info("state_kept", run=run_id, round=outcome.key.round, clip_factor=round(outcome.clip_factor, 5))


def _of_epoch(outcome: training_pb2.Outcome, epoch: int) -> training_pb2.Outcome:
    """The outcome with an epoch: it identifies the state that the update created in that epoch."""
    created_by = training_pb2.Outcome()
    created_by.CopyFrom(outcome)
    created_by.state_epoch = epoch
    return created_by


def _age(created_by: training_pb2.Outcome) -> tuple[int, int]:
    return created_by.state_epoch, created_by.key.round


def _identity(created_by: training_pb2.Outcome) -> tuple[Key, bytes, int]:
    """Identifies a client state among all others."""
    return key_of(created_by.key), created_by.digest.value, created_by.state_epoch


def _description(created_by: training_pb2.Outcome) -> str:
    digest, key = created_by.digest.value.hex()[:16], created_by.key
    return f"update {digest} of round {key.round} in epoch {created_by.state_epoch} of run {key.run_id}"
