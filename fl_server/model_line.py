"""The line of models of one run: the first one, and one for each committed round, each durable before it is used."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import structlog

import algorithms as fl
from fl_server.broadcast import Broadcast, make_broadcast
from fl_server.engine import Engine, Snapshot
from fl_server.ledger import until_room
from fl_server.parts import Parts
from fl_server.progress import RoundLog
from fl_server.step import StepNorms
from fl_server.store.base import CommitRecord, HistoryRecord, StoreError, UpdateRecord
from fl_server.store.checkpoints import INITIAL
from protos.fl.v1.tensor_pb2 import RESOURCE_KIND_DIRECTION

log = structlog.get_logger()

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Committed:
    """What a checkpoint tells of the round that made it."""

    record: CommitRecord
    left_out: tuple[str, ...]
    """Clients whose accepted updates the reducer did not take."""


class ModelLine:
    """The models of a run, and what computes them. Its methods are awaited one at a time, evaluations apart."""

    def __init__(self, parts: Parts, run_id: str, make_engine: Callable[[], Engine]) -> None:
        self._parts = parts
        self._run_id = run_id
        self._make_engine = make_engine
        self._engine: Engine | None = None
        self._snapshot: Snapshot | None = None
        self._sums: dict[str, fl.Tensors] = {}
        self._next: tuple[Snapshot, StepNorms] | None = None
        self.broadcasts: tuple[Broadcast, ...] = ()
        """What clients fetch for the exchange under way."""

    @property
    def engine(self) -> Engine:
        """What computes. The run must be loaded."""
        return _loaded(self._engine)

    @property
    def snapshot(self) -> Snapshot:
        """The latest committed model. The run must be loaded."""
        return _loaded(self._snapshot)

    @property
    def loaded(self) -> bool:
        """Whether tensors are in memory."""
        return self._snapshot is not None

    @property
    def bytes_down(self) -> int:
        """To one client for the exchange under way; frozen parts, which go down once, apart."""
        return sum(each.resource.size_bytes for each in self.broadcasts if each.kind != "frozen")

    async def load(self, state_epoch: int = 0) -> Committed | None:
        """Read the latest valid model, or make the first; ready for the next round.

        Returns the commit that its checkpoint tells of, which the ledger may lack if a crash came between the two.
        Raises StoreError if nothing valid is left of a run that had begun.
        """
        self._engine = self._engine or await self._parts.in_compute(self._make_engine)
        saved = await self._parts.in_compute(self._parts.checkpoints.latest, self._run_id)
        commit = saved.facts.get("commit") if saved else None
        if saved is None:
            self._snapshot = await self._parts.in_compute(self.engine.first)
            await self._save(self._snapshot, {})
        else:
            self._snapshot = self.engine.from_checkpoint(saved)
            # The clients' states may have been restarted after the checkpoint was written.
            if commit is not None and commit.get("state_epoch", 0) < state_epoch:
                self._snapshot = self.engine.restart(self._snapshot)
        await self.prepare(0)
        return Committed(CommitRecord(**commit), tuple(saved.facts.get("left_out", ()))) if saved and commit else None

    async def restart(self) -> None:
        """What the server keeps of the clients' states starts anew."""
        if self.loaded:
            self._snapshot = self.engine.restart(self.snapshot)

    def unload(self) -> None:
        """The run has ended: let go of the tensors."""
        self._engine = self._snapshot = self._next = None
        self._sums = {}
        self.broadcasts = ()

    async def prepare(self, exchange: int) -> None:
        """Encode what the clients of an exchange fetch; what is the same as before stays as it is."""
        if exchange == 0:
            self._sums = {}
        self.broadcasts = await self._parts.in_compute(self._encode, self.snapshot, exchange)

    def _encode(self, snapshot: Snapshot, exchange: int) -> tuple[Broadcast, ...]:
        chunk_bytes = self._parts.config.limits.chunk_bytes
        # Frozen parts are the run's for ever, and a model is the round's.
        kept = {each.resource.kind: each for each in self.broadcasts if exchange or each.kind == "frozen"}
        return tuple(
            kept[outgoing.kind]
            if outgoing.kind in kept and outgoing.kind != RESOURCE_KIND_DIRECTION
            else make_broadcast(outgoing, chunk_bytes)
            for outgoing in self.engine.outgoing(snapshot, exchange, self._sums)
        )

    async def reduce(self, exchange: int, updates: Sequence[UpdateRecord], paths: Sequence[Path]) -> None:
        """Sum up an exchange that is not the round's last, and make ready for the next one."""
        sums = await self._parts.in_compute(self.engine.reduce, self.snapshot, exchange, _cohort(updates), paths)
        self._sums = {**self._sums, **sums}
        await self.prepare(exchange + 1)

    async def step(self, updates: Sequence[UpdateRecord], paths: Sequence[Path]) -> StepNorms:
        """Compute the next model from the accepted updates, in the order of id bytes. Raises Diverged."""
        before: Mapping[str, fl.Tensors] = self._sums
        self._next = await self._parts.in_compute(self.engine.step, self.snapshot, _cohort(updates), paths, before)
        return self._next[1]

    async def commit(self, record: CommitRecord, why: HistoryRecord, no_room: Callable[[str], None]) -> CommitRecord:
        """Make what `step` computed the latest model: checkpoint first, then the ledger.

        With a full disk it says so through `no_room` and tries again until there is room; until then the old state
        stays.
        """
        snapshot, norms = _loaded(self._next)
        self._sums = {}
        broadcasts = await self._parts.in_compute(self._encode, snapshot, 0)
        record = replace(record, model_digest=broadcasts[0].text)
        facts: dict[str, object] = {"commit": asdict(record), "left_out": norms.left_out}
        began = time.monotonic()
        await until_room(no_room, lambda: self._save(snapshot, facts))
        await self._parts.ledger.insist(no_room, self._parts.ledger.store.commit, record, why, norms.left_out)
        self._parts.metrics.commit_write_seconds.observe(time.monotonic() - began)
        self._snapshot, self._next, self.broadcasts = snapshot, None, broadcasts
        return record

    async def evaluate(self, snapshot: Snapshot) -> dict[str, float]:
        """The task's metrics of a committed model. Raises what the task raises."""
        return await self._parts.in_compute(self.engine.evaluate, snapshot)

    async def prune(self, rounds: RoundLog, keep: int) -> None:
        """Remove all checkpoints but the latest few, the best and what may become it. Failing to is no harm."""
        latest = sorted(rounds.commits)[-keep:]
        best = {rounds.best.round} if rounds.best else set()
        kept = {*latest, *best, *rounds.under_way} or {INITIAL}
        try:
            await self._parts.in_compute(self._parts.checkpoints.prune, self._run_id, kept)
        except StoreError as error:
            log.warning("prune_failed", run=self._run_id, error=str(error))

    async def _save(self, snapshot: Snapshot, facts: dict[str, object]) -> None:
        checkpoint = self.engine.to_checkpoint(snapshot, facts)
        await self._parts.in_compute(self._parts.checkpoints.save, self._run_id, snapshot.round, checkpoint)


def _cohort(updates: Sequence[UpdateRecord]) -> list[fl.UpdateInfo]:
    return [fl.UpdateInfo(each.client_id, each.num_examples, each.num_steps, each.clip_factor) for each in updates]


def _loaded(part: T | None) -> T:
    if part is None:
        raise RuntimeError("expected a run that is loaded and, for a commit, has computed its step")
    return part
