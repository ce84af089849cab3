"""One run with all its parts, from its start to its end.

Long work (reduction, server step, commit, evaluation) runs in tasks, and each result is an event. The order of writes
makes a crash harmless: a cohort is in the ledger before it gets its work, an update before it is acknowledged, a
checkpoint before its round is announced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace as replace_fields
from itertools import chain

import structlog

from fl_server.aggregation.outgoing import Broadcast
from fl_server.aggregation.privacy import seed_of_draws
from fl_server.rounds import effects
from fl_server.rounds.state import replace
from fl_server.run import failures
from fl_server.run.context import RunContext, RunDependencies
from fl_server.run.control import RunControl
from fl_server.run.effects import Effects, RunParts
from fl_server.run_settings.config import RunConfig
from fl_server.services import Services
from fl_server.store.records import RunRecord

log = structlog.get_logger()


class Run(RunControl):
    """One run with all its parts. Lives on the event loop."""

    def __init__(self, services: Services, record: RunRecord, config: RunConfig, dependencies: RunDependencies) -> None:
        context = RunContext(services, record.run_id, config, dependencies)
        super().__init__(context, record, config)
        if secret := dependencies.models.secret:
            policy = replace_fields(self.state.policy, seed=seed_of_draws(secret))
            self.state = replace(self.state, policy=policy)
        self.take_account(dependencies.account)
        self.rounds, self.model, self.watchers = context.rounds, context.model, context.watchers
        self.client_states = context.client_states
        parts = RunParts.create(self.context, self)
        self.deadline, self.submissions, self.dispatch = parts.deadline, parts.submissions, parts.dispatch
        self.lost_states, self.stages = parts.lost_states, parts.stages
        self.server_evaluation, self.client_evaluations = parts.server_evaluation, parts.client_evaluations
        self._effects = Effects(self.context, self, parts)

    async def carry_out(self, effect: effects.Effect) -> None:
        """Do what the round state machine demands."""
        await self._effects.handle(effect)

    @property
    def task(self) -> Mapping[str, str]:
        """Name, version and source of the task that clients must have."""
        return self.context.task

    # Its life.

    def start(self) -> None:
        """Start processing events and counting time. Tasks that already run go on."""
        self.context.metrics.reported.started(self.id)
        self.ensure("events", self.process_events())
        self.ensure("time", failures.count_wall_time(self))
        self.ensure("deadline", self._save_times_regularly())
        self.fleet_changed()

    async def close(self) -> None:
        """Stop working. Everything that matters is on disk."""
        await self.end_tasks()
        self.context.trace.close()
        self.watchers.end()
        await self._save_times()

    def client_attached(self, client_id: str) -> None:
        """A client is here: send it the work that it still has."""
        self.client_evaluations.client_attached(client_id)
        if not self.ended:
            self.dispatch.client_back(client_id)
            self.eligible.notify(client_id)

    def drain(self) -> None:
        """Give no client new work: the coordinator is about to stop."""
        self.draining = True
        self.eligible.invalidate()
        self.fleet_changed()

    async def _save_times(self) -> None:
        """Write all times that do not count while the coordinator is down, and the bytes so far."""
        await self.deadline.save()
        await self.client_evaluations.save_times()
        await self.run_status.save_usage()

    async def _save_times_regularly(self) -> None:
        while not self.ended:
            await asyncio.sleep(failures.SAVE_EVERY_S)
            await self._save_times()
            if self.run_status.waiting_reason:  # a client may be lost for long enough now
                self.eligible.invalidate()
                self.fleet_changed()

    def broadcast(self, digest: bytes) -> Broadcast | None:
        """The broadcast with that digest, if clients can fetch it now: a bundle or a difference."""
        sent = chain(self.model.sent, self.client_evaluations.broadcasts())
        return next((named for broadcast in sent if (named := broadcast.named(digest)) is not None), None)
