"""The long computations of a round: the sums of an exchange, the next model, and its commit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from fl_common.secure_aggregation.errors import SecureAggregationError
from fl_common.secure_aggregation.scalars import Summed
from fl_server.admission.client_rules import mean_epochs
from fl_server.admission.norms import Culprits, Measured, norms_in_ledger, norms_of, outliers, overflow_culprit
from fl_server.aggregation.secure_aggregation import SpoiledSum
from fl_server.aggregation.server_update import Diverged, ServerUpdateStats
from fl_server.aggregation.updates import digest_of_source
from fl_server.rounds import effects
from fl_server.rounds import events as ev
from fl_server.rounds.metrics import as_received
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.run.evaluations import ServerEvaluations
from fl_server.run.round_statistics import why_short
from fl_server.run.secure_stages import SecureStages
from fl_server.store.errors import StoreError
from fl_server.store.records import CommitRecord, HistoryRecord, UpdateRecord
from fl_server.store.spool.part_file import SpoolSource
from fl_server.store.spool.spool import Spool, SpoolKey
from protos.codec import digest_text

log = structlog.get_logger()

DOMINANT_WEIGHT, FEW_UPDATES = 0.5, 2
"""A weight over the first is logged in a round of more updates than the second."""


class RoundComputation:
    """Computes the rounds of one run. Its methods start tasks; the results come as events."""

    def __init__(
        self, context: RunContext, control: RunControl, stages: SecureStages, evaluation: ServerEvaluations
    ) -> None:
        self._context, self._control, self._submissions = context, control, stages.submissions
        self._stages = stages
        self._updates: list[UpdateRecord] = []
        """The accepted updates of the exchange that is computed, until its round is committed."""
        self._evaluation = evaluation
        self._task: asyncio.Task[None] | None = None
        """The latest computation."""
        self._committing = False
        self._summed = Summed(0)
        """What the masked updates said besides the model, until their round is committed."""
        self.handlers: Mapping[type, Callable[[Any], Awaitable[None]]] = {
            effects.ReduceExchange: self._reduce_exchange,
            effects.ComputeStep: self._compute_step,
            effects.Commit: self._commit_model,
        }

    def _start(self, work: Coroutine[Any, Any, None], *, committing: bool = False) -> None:
        self._task, self._committing = self._control.spawn(work), committing

    async def stop(self) -> None:
        """Give up the computation under way, so that the run's model can be released.

        A commit is not given up, because its checkpoint may be durable already.
        """
        if self._task is None or self._task.done():
            return
        if not self._committing:
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _reduce_exchange(self, command: effects.ReduceExchange) -> None:
        """Fix the accepted list, then reduce the exchange."""
        await self._fix(command.accepted)
        self._start(self._reduce())

    async def _compute_step(self, command: effects.ComputeStep) -> None:
        """Fix the accepted list, then compute the next model."""
        await self._fix(command.accepted, command.versions)
        self._start(self._compute_model())

    async def _commit_model(self, command: effects.Commit) -> None:
        """Write the next model."""
        del command
        self._start(self._commit(), committing=True)

    async def _fix(self, accepted: ev.Accepted, versions: tuple[int, ...] = ()) -> None:
        state, context = self._control.state, self._context
        place = context.run_id, state.round, state.exchange
        await self._control.write(context.store.fix_accepted, *place, accepted, versions)

    async def _read_updates(self) -> Sequence[SpoolSource] | None:
        """Read the accepted updates of the exchange under way, in the order of their list, for their bytes.

        None: some of them spoil the round, and were reported.
        """
        state, context, services = self._control.state, self._context, self._context.services
        updates = await self._control.read(context.store.accepted_updates, context.run_id, state.round, state.exchange)
        self._updates = updates
        if self._report(await services.in_compute(self._outliers, updates), "norm"):
            return None
        sources = await services.in_compute(update_sources, services.spool, updates)
        return None if await self._are_damaged(updates, sources) else sources

    async def _reduce(self) -> None:
        model, exchange = self._context.model, self._control.state.exchange
        if (sources := await self._read_updates()) is None:
            return
        updates = self._updates
        try:
            await self._control.retry(lambda: model.reduce(exchange, updates, sources))
        except Diverged as error:
            self._diverged(updates, error)
            return
        self._count_admitted(updates)
        self._control.post(ev.ExchangeReduced())

    async def _compute_model(self) -> None:
        if (sources := await self._read_updates()) is None:
            return
        model, updates, attempt = self._context.model, self._updates, self._control.state.attempt
        try:
            if self._control.state.policy.secure:
                total = await self._control.retry(lambda: self._stages.total(sources))
                self._summed = total.summed
                norms = await self._control.retry(lambda: model.compute_from_sum(updates, total, attempt))
            elif self._control.state.policy.buffered:
                round_ = self._control.state.round
                norms = await self._control.retry(lambda: model.compute_buffered(updates, sources, round_))
            else:
                norms = await self._control.retry(lambda: model.compute_next(updates, sources, attempt))
        except (SecureAggregationError, SpoiledSum) as error:
            warn = self._context.cohort_log.warning
            warn("sum_spoiled", run=self._context.run_id, round=self._control.state.round, error=str(error))
            self._control.post(ev.RoundSpoiled(str(error)))
            return
        except Diverged as error:
            self._diverged(updates, error)
            return
        if norms.left_out:
            log.info(
                "updates_left_out", run=self._context.run_id, round=self._control.state.round, clients=norms.left_out
            )
        self._check_weights(norms, len(updates))
        self._count_admitted(updates)
        private = self._control.config.client_privacy is not None or self._control.state.policy.secure
        self._context.counters.model_computed(norms, [] if private else [update.norm for update in updates])
        self._control.post(ev.StepComputed())

    def _count_admitted(self, updates: Sequence[UpdateRecord]) -> None:
        """Nobody can refuse these updates any more."""
        self._context.counters.assignments_ended("admitted", len(updates))
        for update in updates:
            self._context.counters.staleness(self._control.state.round - update.round)

    def _outliers(self, updates: Iterable[UpdateRecord]) -> Culprits:
        context = self._context
        if self._control.state.policy.secure:
            return ()
        return outliers(self._control.config.round, context.norms, _measured(updates), context.model.snapshot.norm)

    async def _are_damaged(self, updates: Sequence[UpdateRecord], sources: Sequence[SpoolSource]) -> bool:
        """Have updates refused whose bytes are not those that were admitted. Returns whether there are any.

        The digests of bytes that a worker wrote are its word. Those that this process wrote it has read itself.
        """
        services = self._context.services
        if services.config.workers is None:
            return False
        reading = (self._control.retry(partial(services.in_io, _digest_there, source)) for source in sources)
        damaged = tuple(
            (update.client_id, f"expected bytes with the digest {digest_text(update.digest)}, found {_shown(came)}")
            for update, came in zip(updates, await asyncio.gather(*reading), strict=True)
            if came != update.digest
        )
        if damaged and self._control.state.policy.secure:
            self._control.post(ev.RoundSpoiled(f"{damaged[0][0]}: {damaged[0][1]}"))
            return True
        return self._report(damaged, "")

    def _report(self, culprits: Culprits, fault: ev.CulpritFault = "not_finite") -> bool:
        """Have updates refused that spoil the exchange. Returns whether there are any."""
        if culprits:
            self._control.post(ev.CulpritsFound(culprits, fault))
        return bool(culprits)

    def _diverged(self, updates: Iterable[UpdateRecord], error: Diverged) -> None:
        """Refuse the update that made a sum overflow. Without such an update the run fails and can be resumed."""
        if not self._report(overflow_culprit(_measured(updates))):
            log.error("run_diverged", run=self._context.run_id, round=self._control.state.round, error=str(error))
            self._control.post(ev.ModelDiverged(str(error)))

    def _check_weights(self, norms: ServerUpdateStats, updates: int) -> None:
        """Log capped weights, and a client with more weight than all others together where nothing caps it."""
        run_id, state = self._context.run_id, self._control.state
        if norms.capped:
            self._context.counters.weights_capped(len(norms.capped))
            log.info("weights_capped", run=run_id, round=state.round, clients=norms.capped)
        client, weight = norms.largest
        uncapped = not self._control.config.round.max_client_share
        if weight > DOMINANT_WEIGHT and updates > FEW_UPDATES and uncapped:
            log.warning(
                "client_outweighs", run=run_id, round=state.round, client=client, share=round(weight, 4),
                why="it has more weight than all other clients together; round.max_client_share limits it",
            )  # fmt: skip

    async def _commit(self) -> None:
        context, control = self._context, self._control
        state, now = control.state, time.time()
        updates, self._updates = self._updates, []
        counted = {update.client_id for update in updates}
        if exchanges := state.exchange:
            norms = await control.read(norms_in_ledger, context.store, context.run_id, state.round, exchanges + 1)
        else:
            norms = [norms_of(update) for update in updates]
        reason = ""
        if not context.hides_cohorts:
            reason = why_short(state, context.rounds.transfers.outs, control.eligible.without)
        if reason:
            context.counters.round_short(reason)
            log.warning("round_short", run=context.run_id, round=state.round, why=reason)
        record = replace(self._commit_record(updates, now), norms=context.norms.after(norms).to_text())
        record = self._of_sums_only(record)
        why = HistoryRecord(now, "coordinator", "round_committed", context.run_id, reason or f"round {state.round}")
        record = await context.model.commit(record, why, control.retry)
        context.norms.put_back(record.norms)
        control.run_status.committed()
        context.rounds.began = None
        self._submissions.failures.clear()
        draw = await context.draw_of(record.round)
        done = counted.difference(control.state.drawn) if state.policy.buffered else None
        context.rounds.add(record, control.record.extended_at, draw, done)
        context.fleet.work.changed(counted | (draw.drawn if draw else frozenset()))
        if (totals := context.rounds.totals_due(context.run_id)) is not None:
            await control.write(context.store.put_totals, totals)
        if context.keeps_client_state:
            context.client_states.count(updates, record.state_epoch)
        control.post(ev.ModelCommitted(self._evaluation.under_way))
        # Ledger calls run in order, so this is known before the first update of the next round can be refused.
        standings = await control.read(context.store.quarantine_records)
        context.fleet.quarantine.restore(standings)
        if not context.hides_cohorts:  # a note that is removed would tell who was drawn
            with suppress(StoreError):  # the next write of the run reports it
                await context.fleet.records.clear_notes(sorted(counted - context.label_order.suspected))

    def _of_sums_only(self, record: CommitRecord) -> CommitRecord:
        """Secure aggregation and privacy of clients: nothing of single clients, and no mean without noise."""
        secure, summed = self._control.state.policy.secure, self._summed
        if secure or self._control.config.client_privacy is not None:
            record = replace(record, training_loss=None, epochs=(), norms="")
        if not secure:
            return record
        metrics = as_received(summed.evaluated, summed.metrics)
        return replace(record, training_loss=summed.training_loss, metrics=metrics)

    def _commit_record(self, updates: Iterable[UpdateRecord], now: float) -> CommitRecord:
        state, rounds = self._control.state, self._context.rounds
        losses = [update.training_loss for update in updates if update.training_loss is not None]
        return CommitRecord(
            run_id=self._context.run_id,
            round=state.round,
            committed_at=now,
            seconds=0.0 if rounds.began is None else time.monotonic() - rounds.began,
            attempts=state.attempt + 1,
            accepted=len(state.accepted),
            dropped=len(state.out) if state.policy.buffered else len(state.drawn) - len(state.accepted),
            training_loss=sum(losses) / len(losses) if losses else None,
            bytes_down=rounds.bytes.down,
            bytes_up=rounds.bytes.up,
            model_digest="",
            state_epoch=self._control.state.state_epoch,
            over_selection=state.over_selection,
            statistics=rounds.statistics.to_text(),
            epochs=mean_epochs((update.num_examples, update.epochs) for update in updates),
        )


def _digest_there(source: SpoolSource) -> bytes:
    """The digest of an update's bytes; empty if they are gone."""
    try:
        return digest_of_source(source)
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return b""
        raise


def _shown(digest: bytes) -> str:
    return digest_text(digest) if digest else "none"


def _measured(updates: Iterable[UpdateRecord]) -> list[Measured]:
    return [Measured(update.client_id, norms_of(update), update.clip_factor) for update in updates]


def update_sources(spool: Spool, updates: Iterable[UpdateRecord]) -> list[SpoolSource]:
    """What the bytes of admitted updates are read from."""
    return [
        spool.source(SpoolKey(update.run_id, update.round, update.exchange, update.client_id), update.digest)
        for update in updates
    ]
