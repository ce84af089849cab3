"""The models of a run: the first one and one for each committed round. Each is durable before it is used."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import structlog

import algorithms as fl
from fl_common.allocator import give_back_freed_memory
from fl_common.units import size
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.methods import outside_names
from fl_server.aggregation.outgoing import Broadcast, make_broadcast
from fl_server.aggregation.outside_task.remote_task import RemoteTask
from fl_server.aggregation.secure_aggregation import Total
from fl_server.aggregation.server_update import ServerUpdateStats
from fl_server.aggregation.snapshot import Snapshot
from fl_server.aggregation.updates import Source
from fl_server.errors import InvalidInput
from fl_server.outside_calls import OutsideCode
from fl_server.run.rounds import RunRounds
from fl_server.run_settings.config import RunConfig
from fl_server.services import Services
from fl_server.store.checkpoints import INITIAL
from fl_server.store.errors import StoreError
from fl_server.store.records import CommitRecord, HistoryRecord, UpdateRecord
from fl_tasks import Task
from protos.digests import digest_text
from protos.fl.v1.tensor_pb2 import Resource

log = structlog.get_logger()
P = ParamSpec("P")
T = TypeVar("T")
Retry = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""Awaits work until the disk and the ledger let it succeed."""

_LARGE_UPLOADS = 64 << 20
"""Bytes of an exchange's updates after which freed memory is returned: below that it would cost more than it saves."""


def check_update_size(engine: Engine, max_update_mib: int) -> None:
    """Raises InvalidInput for a run with updates that no client could deliver."""
    largest = max(shape.size_bytes for shape in engine.shapes)
    if engine.config.secure_aggregation is not None:
        largest = engine.secure_means.largest_update
    if largest > max_update_mib << 20:
        raise InvalidInput(
            "task",
            f"a model whose updates have at most {max_update_mib} MiB (limits.max_update_mib in server.toml)",
            f"{size(largest)}: raise the limit, or choose a smaller encodings.update",
        )


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What the models of a run are made from, with any of its configurations."""

    task: Task | RemoteTask
    max_model_bytes: int
    start: Path | None
    """The file of the first model's values; None: the task makes them."""
    secret: bytes = b""
    """That of a run with client-level privacy."""

    def engine(self, config: RunConfig) -> Engine:
        """An engine without a model."""
        return Engine(config, self.task, max_model_bytes=self.max_model_bytes, start=self.start, secret=self.secret)


@dataclass(frozen=True, slots=True)
class CheckpointCommit:
    """The commit that a checkpoint was written for."""

    record: CommitRecord
    left_out: tuple[str, ...]
    """Clients whose accepted updates the reducer left out."""


@dataclass(frozen=True, slots=True)
class Version:
    """A model that clients were sent."""

    snapshot: Snapshot
    broadcasts: tuple[Broadcast, ...]


class ModelStore:
    """Loads, computes and commits a run's models. Its methods are awaited one at a time, except `kept`."""

    def __init__(self, services: Services, run_id: str, source: ModelSource) -> None:
        self._services = services
        self._run_id = run_id
        self._source = source
        self._engine: Engine | None = None
        self._snapshot: Snapshot | None = None
        self._sums: dict[str, fl.Tensors] = {}
        self._next: tuple[Snapshot, ServerUpdateStats] | None = None
        self.broadcasts: tuple[Broadcast, ...] = ()
        """What clients fetch for the exchange under way."""
        self._earlier: dict[int, Version] = {}
        """With a buffer: the versions before the latest one from which clients work, or updates in the buffer began."""

    @property
    def sent(self) -> Iterator[Broadcast]:
        """All that clients can fetch: of the latest version, and of earlier ones that are in use."""
        return chain(self.broadcasts, *(version.broadcasts for version in self._earlier.values()))

    @property
    def versions(self) -> int:
        """The number of versions in memory."""
        return len(self._earlier) + self.loaded

    def version(self, number: int) -> Version:
        """The model that a round began from: the latest one, or an earlier one that is in use."""
        return self._earlier.get(number) or Version(self.snapshot, self.broadcasts)

    def keep_versions(self, wanted: AbstractSet[int]) -> None:
        """Drop the earlier versions that are not in use any more."""
        self._earlier = {number: version for number, version in self._earlier.items() if number in wanted}

    async def load_versions(self, wanted: AbstractSet[int]) -> None:
        """Read earlier versions that are in use, and encode them again. Raises StoreError if one is gone."""
        for number in sorted(wanted - {self.snapshot.round + 1, *self._earlier}):
            saved = await self._services.in_compute(self._services.checkpoints.of_round, self._run_id, number - 1)
            if saved is None:
                raise StoreError(f"no valid checkpoint of version {number}, from which clients work: restore a backup")
            snapshot = await self._services.in_compute(self.engine.restored, saved)
            self._earlier[number] = Version(snapshot, await self._computed(self._encode, snapshot, 0))

    @property
    def engine(self) -> Engine:
        """The engine that computes the models. The run must be loaded."""
        return _loaded(self._engine)

    @property
    def size_bytes(self) -> int:
        """Bytes of the latest model, its frozen parameters, and the directions and other state beside it; 0 if none."""
        if self._engine is None or self._snapshot is None:
            return 0
        tensors = [
            *self._engine.snapshots.frozen.values(),
            *self._snapshot.buffers.values(),
            *self._snapshot.state.x.values(),
        ]
        tensors += [tensor for memory in self._snapshot.state.memory.values() for tensor in memory.values()]
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def snapshot(self) -> Snapshot:
        """The latest committed model. The run must be loaded."""
        return _loaded(self._snapshot)

    @property
    def loaded(self) -> bool:
        """Whether tensors are in memory."""
        return self._snapshot is not None

    @property
    def local_frozen(self) -> Resource | None:
        """The frozen parameters that clients must have themselves; None if they are sent, or before the loading."""
        return self._engine.local_frozen if self._engine else None

    @property
    def bytes_down(self) -> int:
        """Bytes to one client for the exchange under way, without frozen parts, which are sent only once."""
        return sum(broadcast.resource.size_bytes for broadcast in self.broadcasts if broadcast.kind != "frozen")

    async def load(self, config: RunConfig, state_epoch: int = 0) -> CheckpointCommit | None:
        """Read the latest valid model, or make the first one; then encode it for the next round.

        Returns the commit in the checkpoint. The ledger lacks it if a crash came between the two writes.
        Raises StoreError if no valid checkpoint is left of a run that had begun.
        """
        self._engine = self._engine or await self._made(config)
        self.engine.release = give_back_freed_memory
        saved = await self._services.in_compute(self._services.checkpoints.latest, self._run_id)
        commit = saved.facts.get("commit") if saved else None
        if saved is None:
            check_update_size(self.engine, self._services.config.limits.max_update_mib)
            self._snapshot = await self._services.in_building(self.engine.first)
            await self._save(self._snapshot, {})
        else:
            self._snapshot = await self._services.in_compute(self.engine.restored, saved)
            # The clients' states may have been restarted after the checkpoint was written.
            if commit is not None and commit.get("state_epoch", 0) < state_epoch:
                await self.restart_states()
        await self.prepare(0)
        if saved is None or not commit:
            return None
        record = await self._with_averaged_digest(CommitRecord.of(commit), self.snapshot)
        return CheckpointCommit(record, tuple(saved.facts.get("left_out", ())))

    async def reported_metrics(self) -> list[str] | None:
        """Names of the task's metrics; None if the server has no held-out examples. Raises TaskError."""
        return await self._services.in_building(self.engine.model.reported_metrics, self.snapshot)

    def reconfigure(self, config: RunConfig) -> None:
        """Compute the next rounds with another configuration of the same task and method. The run must be loaded."""
        self.engine.config = config

    async def restart_states(self) -> None:
        """Reset the server's part of the clients' states to zero."""
        if self.loaded:
            self._snapshot = await self._computed(self.engine.restart, self.snapshot)

    def unload(self) -> None:
        """Release the tensors of a run that has ended."""
        self._engine = self._snapshot = self._next = None
        self._sums, self._earlier = {}, {}
        self.broadcasts = ()

    async def prepare(self, exchange: int) -> None:
        """Encode what the clients of an exchange fetch. Broadcasts that did not change are kept."""
        if exchange == 0:
            self._sums = {}
        self.broadcasts = await self._computed(self._encode, self.snapshot, exchange)

    def _encode(self, snapshot: Snapshot, exchange: int) -> tuple[Broadcast, ...]:
        chunk_bytes = self._services.config.limits.chunk_bytes
        previous = {(broadcast.resource.kind, broadcast.resource.name): broadcast for broadcast in self.broadcasts}
        # Frozen parts never change in a run, and the model does not change within a round.
        kept = {
            key: broadcast
            for key, broadcast in previous.items()
            if broadcast.kind == "frozen" or (exchange and broadcast.kind != "direction")
        }
        return tuple(
            kept.get(key) or make_broadcast(outgoing, chunk_bytes, previous.get(key))
            for outgoing in self.engine.outgoing(snapshot, exchange, self._sums)
            for key in [(outgoing.kind, outgoing.name)]
        )

    async def reduce(self, exchange: int, updates: Sequence[UpdateRecord], sources: Sequence[Source]) -> None:
        """Reduce an exchange that is not the round's last, and encode what the next exchange sends."""
        sums = await self._reduced(updates, self.engine.reduce, exchange, _cohort(updates), sources)
        self._sums = {**self._sums, **sums}
        await self.prepare(exchange + 1)

    async def _reduced(
        self, updates: Sequence[UpdateRecord], function: Callable[Concatenate[Snapshot, P], T], *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:  # fmt: skip
        """The result of a computation from the latest model, and from these updates.

        The memory of large uploads is returned to the kernel first: the next model takes the place of their messages.
        """
        if sum(update.size_bytes for update in updates) >= _LARGE_UPLOADS:
            await self._services.in_compute(give_back_freed_memory)
        return await self._computed(function, self.snapshot, *args, **kwargs)

    async def compute_next(
        self, updates: Sequence[UpdateRecord], sources: Sequence[Source], attempt: int
    ) -> ServerUpdateStats:
        """Compute the next model from the accepted updates, in the order of id bytes. Raises Diverged."""
        before, cohort, engine = self._sums, _cohort(updates), self.engine
        if engine.config.client_privacy is not None:
            normed = [(info, update.norm) for info, update in zip(cohort, updates, strict=True)]
            self._next = await self._reduced(updates, engine.private_update, normed, sources, attempt)
        else:
            self._next = await self._reduced(updates, engine.server_update, cohort, sources, before)
        return self._next[1]

    async def compute_buffered(
        self, updates: Sequence[UpdateRecord], sources: Sequence[Source], round_: int
    ) -> ServerUpdateStats:
        """Compute the next model from the updates of a buffer, in the order of arrival. Raises Diverged."""
        entries = [
            fl.Buffered(info, update.round, round_ - update.round)
            for info, update in zip(_cohort(updates), updates, strict=True)
        ]
        versions = {update.round: self.version(update.round).snapshot for update in updates}
        self._next = await self._reduced(updates, self.engine.buffered_update, entries, sources, versions)
        return self._next[1]

    async def compute_from_sum(self, updates: Sequence[UpdateRecord], total: Total, draw: int) -> ServerUpdateStats:
        """Compute the next model from the sum of masked updates. Raises Diverged, SpoiledSum."""
        self._next = await self._reduced(updates, self.engine.secure_update, _cohort(updates), total, draw)
        return self._next[1]

    async def commit(self, record: CommitRecord, why: HistoryRecord, retry: Retry) -> CommitRecord:
        """Make the computed model the latest one: write the checkpoint first, then the ledger's row.

        Until both are written the previous model stays. retry: `RunTasks.retry` of the run.
        """
        computed, norms = _loaded(self._next)
        self._sums = {}
        broadcasts = await self._computed(self._encode, computed, 0)
        record = replace(record, model_digest=digest_text(broadcasts[0].values_digest))
        facts: dict[str, object] = {"commit": asdict(record), "left_out": norms.left_out}
        began = time.monotonic()
        snapshot = await retry(lambda: self._save(computed, facts))
        record = await self._with_averaged_digest(record, snapshot)
        ledger, saved = self._services.ledger, record
        await retry(lambda: ledger.do(ledger.store.commit, saved, why, norms.left_out))
        self._services.outside.forget_ends(self._run_id)
        self._services.metrics.commit_write_seconds.observe(time.monotonic() - began)
        if self.engine.config.round.close == "buffer":
            self._earlier[record.round] = Version(self.snapshot, self.broadcasts)
        self._snapshot, self._next, self.broadcasts = snapshot, None, broadcasts
        return record

    async def averaged_broadcast(self) -> tuple[Broadcast, ...]:
        """The averaged model after the latest round, for clients that evaluate it; empty if there is none."""
        return await self._computed(self._encode_averaged, self.snapshot)

    def _encode_averaged(self, snapshot: Snapshot) -> tuple[Broadcast, ...]:
        outgoing = self.engine.averaged_for_clients(snapshot)
        return () if outgoing is None else (make_broadcast(outgoing, self._services.config.limits.chunk_bytes),)

    async def kept(self, config: RunConfig, round_: int) -> tuple[Engine, Snapshot] | None:
        """Engine and model of an earlier round, also after the run's end; None if its checkpoint is not kept."""
        saved = await self._services.in_evaluations(self._services.checkpoints.of_round, self._run_id, round_)
        if saved is None:
            return None
        engine = await self._made(config)
        return engine, await self._services.in_evaluations(engine.restored, saved)

    async def prune(self, rounds: RunRounds, keep: int) -> None:
        """Remove all checkpoints except the latest few, the best one, and those that may become the best.

        A failure is logged and has no other effect.
        """
        checkpoints, best = self._services.checkpoints, {rounds.best.round} if rounds.best else set()
        latest, others = range(max(0, rounds.committed - keep), rounds.committed), {*best, *+rounds.being_evaluated}
        others |= {number - 1 for number in self._earlier}
        try:
            on_disk = await self._services.in_compute(checkpoints.rounds, self._run_id)
            kept = {round_ for round_ in on_disk if round_ in latest or round_ in others}
            await self._services.in_compute(checkpoints.prune, self._run_id, kept if rounds.committed else {INITIAL})
        except StoreError as error:
            log.warning("prune_failed", run=self._run_id, error=str(error))

    async def _made(self, config: RunConfig) -> Engine:
        """An engine. Its task's model(), and its method's builder, may be code from outside."""
        code = OutsideCode(self._run_id, outside_names(config))
        if code.names:
            limits = self._services.config.limits
            seconds = limits.task_load_s + limits.method_s
            return await self._services.outside.call(code, seconds, partial(self._source.engine, config))
        return await self._services.in_building(self._source.engine, config)

    async def _computed(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a computation with the run's method and reducer."""
        code = OutsideCode(self._run_id, outside_names(self.engine.config))
        return await self._services.in_code(code, function, *args, **kwargs)

    async def _with_averaged_digest(self, record: CommitRecord, snapshot: Snapshot) -> CommitRecord:
        """The record with the digest of the averaged model, which is known once the sums are written."""
        digest = await self._services.in_compute(self.engine.snapshots.averaged_digest, snapshot)
        return replace(record, averaged_digest=digest)

    async def _save(self, snapshot: Snapshot, facts: dict[str, object]) -> Snapshot:
        """Write the checkpoint. Returns the snapshot whose averaged model is in it."""
        checkpoint = self.engine.snapshots.checkpoint(snapshot, facts)
        folder = await self._services.in_compute(
            self._services.checkpoints.save, self._run_id, snapshot.round, checkpoint
        )
        return snapshot.averaged_in(folder)


def _cohort(updates: Sequence[UpdateRecord]) -> list[fl.UpdateInfo]:
    return [fl.UpdateInfo(row.client_id, row.num_examples, row.num_steps, row.clip_factor) for row in updates]


def _loaded(part: T | None) -> T:
    if part is None:
        raise RuntimeError("expected a run that is loaded and, for a commit, has computed its next model")
    return part
