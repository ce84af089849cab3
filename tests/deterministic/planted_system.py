"""Faults planted into the coordinator and the daemon that only lives of the whole system can find."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

from fl_client.storage.device_storage import DeviceStorage
from fl_client.storage.pending_updates import key_of
from fl_client.training.trainer import Trainer
from fl_server.clients.attendance import Attendance, Presence
from fl_server.run import restore
from fl_server.run.client_evaluations import ClientEvaluations
from fl_server.run.models import ModelStore
from fl_server.runs.coordinator import Coordinator, Outcomes
from fl_server.store.database.transactions import count_updates
from fl_server.store.spool.part_file import PartFile
from fl_server.store.spool.spool import Spool
from fl_server.uploads import receiver
from fl_server.uploads.receiver import Verdicts
from protos.fl.v1.training_pb2 import Assignment
from tests.deterministic.living import live
from tests.deterministic.plan import plan_of
from tests.deterministic.planted import Patch, patched
from tests.deterministic.planted_more import MORE
from tests.deterministic.planted_objects import STORED
from tests.deterministic.planted_privacy import PRIVATE, later


def _acknowledged_before_written() -> Patch:
    async def enter(self: Verdicts, submission: Any, record: Any) -> Any:
        write = submission.run.submissions.record_verdict(record, submission.header)
        later(lambda: asyncio.ensure_future(write))
        return receiver._receipt(submission.header.key, record)

    return Verdicts, "_enter", enter


def _acknowledged_before_in_place() -> Patch:
    seal = PartFile.seal

    def sealed(self: PartFile) -> Path:
        path = seal(self)
        aside = path.rename(path.with_suffix(".later"))
        later(lambda: aside.rename(path))
        return path

    return PartFile, "seal", sealed


def _no_receipt_for_a_repeat() -> Patch:
    async def receipt(self: Verdicts, run: Any, key: Any, client: str) -> None:
        return None

    return Verdicts, "receipt", receipt


def _repeat_counts() -> Patch:
    repeated = Verdicts.repeated

    async def counted(self: Verdicts, submission: Any) -> Any:
        first = await repeated(self, submission)
        if first is not None and first.admitted:
            store = self._services.ledger.store
            with store._transaction("count a repeat") as db:
                count_updates(db, [submission.client])
        return first

    return Verdicts, "repeated", counted


def _removed_before_acknowledged() -> Patch:
    save = DeviceStorage.save

    def saved(self: DeviceStorage, update: Any, next_state: Any) -> Any:
        pending = save(self, update, next_state)
        self.drop(key_of(update.header.key))
        return pending

    return DeviceStorage, "save", saved


def _state_stays() -> Patch:
    return DeviceStorage, "_promote", lambda self, file, outcome: None


def _lost_stream_stays_lost() -> Patch:
    begun = Attendance.begun

    async def attached(self: Attendance, client_id: str, certificate: Any = None) -> None:
        if self.roster.state_of(client_id) in (None, Presence.PRESENT):
            await begun(self, client_id, certificate)

    return Attendance, "begun", attached


def _end_not_told() -> Patch:
    async def told(self: ClientEvaluations) -> None:
        pass

    return ClientEvaluations, "send_run_ended", told


def _ends_not_asked() -> Patch:
    settled = Coordinator.settled

    async def without_ends(self: Coordinator, asked: Any, client_id: str) -> tuple[list[Any], list[str]]:
        return (await settled(self, asked, client_id))[0], []

    return Coordinator, "settled", without_ends


def _outcomes_not_asked() -> Patch:
    async def decided(self: Outcomes, keys: Any, client: str) -> list[Any]:
        return []

    return Outcomes, "decided", decided


def _commit_before_checkpoint() -> Patch:
    save = ModelStore._save

    async def saved(self: ModelStore, snapshot: Any, facts: Any) -> Any:
        later(lambda: asyncio.ensure_future(save(self, snapshot, facts)))
        return snapshot

    return ModelStore, "_save", saved


def _deadline_goes_on() -> Patch:
    async def resume(run: Any) -> None:
        context = run.context
        attempts = await context.services.ledger.do(context.store.attempts, run.id, run.state.round)
        run.rounds.began = time.monotonic()
        run.deadline.start(max(0.1, run.config.round.deadline_s - (time.time() - attempts[-1].opened_at)))

    return restore, "resume_deadline", resume


def _own_seed() -> Patch:
    train, starts = Trainer.train, count(1)

    def trained(self: Trainer, assignment: Assignment, *rest: Any) -> Any:
        changed = Assignment.FromString(assignment.SerializeToString())
        changed.training.seed += next(starts)
        return train(self, changed, *rest)

    return Trainer, "train", trained


def _repeat_refused() -> Patch:
    receipt = Verdicts.receipt

    async def refused(self: Verdicts, run: Any, key: Any, client: str) -> Any:
        first = await receipt(self, run, key, client)
        if first is not None:
            first.admitted = False
        return first

    return Verdicts, "receipt", refused


def _spool_stays() -> Patch:
    return Spool, "remove_run", lambda self, run_id: None


PLANTED: dict[str, Callable[[], Patch]] = {
    "an update is acknowledged before it is written": _acknowledged_before_written,
    "an update is acknowledged before its file has its name": _acknowledged_before_in_place,
    "a repeated update gets no receipt": _no_receipt_for_a_repeat,
    "a repeated update counts twice": _repeat_counts,
    "a repeat of an admitted update is told that it was refused": _repeat_refused,
    "a device trains with another seed than the assignment's": _own_seed,
    "the files of an ended run stay in the spool": _spool_stays,
    "a daemon removes its update before it is acknowledged": _removed_before_acknowledged,
    "a daemon keeps its client state when an update has counted": _state_stays,
    "a client whose stream was lost is not drawn again": _lost_stream_stays_lost,
    "the end of a run is not told to its clients": _end_not_told,
    "a daemon that was away does not learn its outcomes": _outcomes_not_asked,
    "a daemon that was away does not learn which runs have ended": _ends_not_asked,
    "a commit is written before its checkpoint": _commit_before_checkpoint,
    "a deadline goes on while the coordinator is down": _deadline_goes_on,
}

PLANTED |= MORE | PRIVATE | STORED


def found_by(name: str, check: str, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first of the seeds whose life finds a planted fault by a check, and what it violates. None if none does."""
    with patched(PLANTED[name]()):
        for seed in seeds:
            if f"{check}: " in (error := live(plan_of(seed)).error):
                return seed, error
    return None
