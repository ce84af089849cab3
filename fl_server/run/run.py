"""One run: its event loop, and the parts that it is made of.

Events come from the fleet, from uploads, from operators and from the run's own work. They are processed one at a time
by the round state machine; `commands.py` carries out the commands that result. Long work (reduction, server step,
commit, evaluation) runs in tasks, and each result is an event. The order of writes makes a crash harmless: a cohort is
in the ledger before it gets its work, an update before it is acknowledged, a checkpoint before its round is announced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import ParamSpec, TypeVar

import structlog

from algorithms import AlgorithmError
from fl_server.aggregation.sending.broadcast import Broadcast
from fl_server.errors import RunBroke, WrongState
from fl_server.metrics.runs import RunFigures
from fl_server.rounds import effects
from fl_server.rounds import events as ev
from fl_server.rounds.machine import advance, applies
from fl_server.rounds.state import Phase, RoundState, UnexpectedEvent
from fl_server.run import deadline
from fl_server.run.context import RunContext, RunDependencies
from fl_server.run.effects import CommandHandlers, RunParts
from fl_server.run.eligible import EligibleClients
from fl_server.run.progress import Progress
from fl_server.run.status.current import RunStatus
from fl_server.run.status.figures import run_figures
from fl_server.run.tasks import RunTasks
from fl_server.run_config import RunConfig
from fl_server.services import Services
from fl_server.store.errors import StoreTakenOver
from fl_server.store.ledger import write_when_possible
from fl_server.store.records import HistoryRecord, RunRecord
from fl_tasks import TaskError

log = structlog.get_logger()
P = ParamSpec("P")
R = TypeVar("R")


class Run:
    """A run's state and its loop; implements `RunControl`. Lives on the event loop."""

    def __init__(self, services: Services, record: RunRecord, config: RunConfig, dependencies: RunDependencies) -> None:
        self.record, self.config = record, config
        self.context = RunContext.create(services, record.run_id, config, dependencies)
        algorithm = dependencies.algorithm
        population = config.population if algorithm.needs_population else 0
        policy = replace(
            config.policy(len(algorithm.exchanges), population),
            rounds_between_restarts=services.config.states.rounds_between_restarts,
        )
        self.state = RoundState(
            policy,
            config.stop.rounds,
            state_epoch=record.state_epoch,
            wall_time_s=config.stop.wall_time_s,
            elapsed_s=record.elapsed_s,
        )
        self.log, self.model, self.watchers = self.context.log, self.context.model, self.context.watchers
        self.client_states = self.context.client_states
        self.draining = False
        self.tasks = RunTasks(self._task_failed, self.post)
        self.run_status = RunStatus(self.context, self)
        self.turn = asyncio.Lock()
        self.eligible = EligibleClients(self.context, self)
        parts = RunParts.create(self.context, self)
        self.deadline, self.submissions, self.dispatch = parts.deadline, parts.submissions, parts.dispatch
        self.lost_states = parts.lost_states
        self.server_evaluation, self.client_evaluations = parts.server_evaluation, parts.client_evaluations
        self._handlers = CommandHandlers(self.context, self, parts)
        self._events: asyncio.Queue[ev.Event | None] = asyncio.Queue()
        self._phase_began = time.monotonic()
        self._ended = asyncio.Event()

    @property
    def id(self) -> str:
        """The run's id."""
        return self.record.run_id

    @property
    def status(self) -> str:
        """One of "waiting", "running", "paused", "completed", "stopped" or "failed"."""
        return self.run_status.current

    @property
    def stored_state(self) -> str:
        """The status in the ledger."""
        return self.record.state

    @property
    def task(self) -> Mapping[str, str]:
        """Name, version and source of the task that clients must have."""
        return self.context.task

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self.state.phase is Phase.ENDED

    @property
    def end_reason(self) -> str:
        """Why the run has ended, and the command that continues a diverged one; empty before its end."""
        reason = self.state.ending[1] if self.ended and self.state.ending else ""
        if self.state.failed_by not in ("not_finite", "norm"):
            return reason
        rate = self.config.local.learning_rate_in(self.state.round) / 2
        return f"{reason}; `fl run resume {self.id} --learning-rate {rate:g}` continues from there with half the rate"

    @property
    def computing(self) -> bool:
        """Whether a reduction, server step or commit is under way. A stopping coordinator waits for it."""
        return self.state.phase in (Phase.REDUCING, Phase.STEPPING, Phase.COMMITTING)

    def figures(self) -> RunFigures:
        """The values of the run's gauges; also for a scraper's thread."""
        return run_figures(self.context, self)

    # Its life.

    def start(self) -> None:
        """Start processing events and counting time. Tasks that already run go on."""
        self.context.metrics.reported.started(self.id)
        self.tasks.ensure("events", self._process_events)
        self.tasks.ensure("time", lambda: deadline.count_wall_time(self))
        self.tasks.ensure("deadline", self._save_times_regularly)
        self.fleet_changed()

    async def close(self) -> None:
        """Stop working. Everything that matters is on disk."""
        await self.tasks.close()
        self.context.trace.close()
        self.watchers.end()
        await self._save_times()

    def drain(self) -> None:
        """Give no client new work: the coordinator is about to stop."""
        self.draining = True
        self.eligible.invalidate()
        self.fleet_changed()

    async def _process_events(self) -> None:
        """Process events until the run is over. `start` starts it again for a run that is extended."""
        while not self.ended:
            event = await self._events.get()
            async with self.turn:
                try:
                    await self.eligible.update()
                    if event is not None and self.applies(event):
                        await self._take(event)
                except Exception as error:  # noqa: BLE001 - whatever went wrong, the run fails with it
                    await self._break_by(error)
        while not self._events.empty():
            self._events.get_nowait()  # events for the run that is over

    async def _save_times(self) -> None:
        """Write all times that do not count while the coordinator is down, and the bytes so far."""
        await self.deadline.save()
        await self.client_evaluations.save_times()
        await deadline.save_usage(self.context, self)

    async def _save_times_regularly(self) -> None:
        while not self.ended:
            await asyncio.sleep(deadline.SAVE_EVERY_S)
            await self._save_times()
            if self.run_status.waiting_reason:  # a client may be lost for long enough now
                self.eligible.invalidate()
                self.fleet_changed()

    async def in_turn(self, work: Callable[[], Awaitable[R]]) -> R:
        """Do work that holds the turn, to its end: also if the call that asked for it is cancelled."""

        async def holding_turn() -> R:
            async with self.turn:
                return await work()

        return await self.tasks.to_the_end(holding_turn())

    async def take_request(self, event: ev.Event, why: HistoryRecord, record: RunRecord | None = None) -> None:
        """Process an operator's event at once, with its line in the history. The caller holds `turn`.

        record: the run's row, if the request changes it; it is written together with the line.
        Raises WrongState if the run has just ended, or is in another state without a rule for the event; RunBroke if
        the run failed with it.
        """
        await self.eligible.update()
        try:
            advance(self.state, event)
        except UnexpectedEvent as unexpected:
            raise WrongState(self.id, self.status, ("running",), why.event) from unexpected
        ledger, store = self.context.services.ledger, self.context.store
        if record is None:
            await ledger.do(store.add_history, why)
        else:
            await ledger.do(store.update_run, record, why)
            self.record = record
        log.info(why.event, run=self.id, actor=why.actor, detail=why.detail)
        if not await self.take(event):
            raise RunBroke(self.id, self.end_reason)

    async def wait_until_ended(self, seconds: float) -> None:
        """Wait until the run has ended, at most so long."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)

    # Events.

    def applies(self, event: ev.Event) -> bool:
        """Whether the event still means something in the current state."""
        return applies(event, self.state)

    def post(self, event: ev.Event) -> None:
        """Queue an event. A run that has ended ignores it."""
        if not self.ended:
            self._events.put_nowait(event)

    def fail(self, reason: str) -> None:
        """End the run with an error. The last committed model stays."""
        self.post(ev.EndRequested("failed", reason))

    def _task_failed(self, error: Exception) -> None:
        if (end := self._end_by(error)) is not None:
            self.post(end)

    def _end_by(self, error: Exception) -> ev.EndRequested | None:
        """The end of the run that an unexpected error causes.

        None if another coordinator has the ledger: then this one ends, and its state is not valid any more.
        """
        if isinstance(error, StoreTakenOver):
            return None
        log.error("run_failed", run=self.id, phase=self.state.phase.value, error=repr(error), exc_info=error)
        if isinstance(error, TaskError | AlgorithmError):  # of code from outside, which it names
            return ev.EndRequested("failed", str(error), broken=True)
        reason = f"a fault of the coordinator: {error!r}; see its log"
        return ev.EndRequested("failed", reason, broken=True)

    async def take(self, event: ev.Event) -> bool:
        """Process an event that applies at once. The caller holds `turn`.

        If one of its commands fails, the run fails in the same turn: no other event meets a state whose commands are
        half done. A failed run continues from what the ledger has. Returns whether the commands were carried out.
        """
        try:
            await self._take(event)
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the run fails with it
            await self._break_by(error)
            return False
        return True

    async def _take(self, event: ev.Event) -> None:
        for command in self._advance(event):
            await self._handlers.handle(command)
        self._note_end()
        if isinstance(event, ev.UpdateAdmitted):
            self.watchers.publish(Progress("admitted", event.client))
        await self.run_status.save_if_changed()

    def _advance(self, event: ev.Event) -> tuple[effects.Effect, ...]:
        before = self.state
        self.state, commands = advance(before, event)
        self.eligible.reserve()
        if self.state.phase is not before.phase:
            self._phase_changed(before.phase)
        return commands

    async def _break_by(self, error: Exception) -> None:
        """Fail the run because a command failed. What cannot be written is left to the next start of the coordinator.

        A run that had just ended, and whose end could not be written, failed too.
        """
        if (end := self._end_by(error)) is None:
            return
        if self.ended:
            self.state = replace(self.state, ending=(end.status, end.reason))
        commands = (effects.EndRun(end.status, end.reason),) if self.ended else self._advance(end)
        for command in commands:
            try:
                await self._handlers.handle(command)
            except Exception as another:  # noqa: BLE001 - the other commands release what the run holds
                log.error("end_incomplete", run=self.id, command=type(command).__name__, error=repr(another))
        self._note_end()

    def _note_end(self) -> None:
        """Let the loop and the calls know that wait for the end of the run, or that it goes on."""
        if self.ended:
            self._ended.set()
            self._events.put_nowait(None)  # wakes the loop so that it ends too, if an operator ended the run
        else:
            self._ended.clear()

    def _phase_changed(self, before: Phase) -> None:
        now = time.monotonic()
        self.context.counters.phase_ended(before, now - self._phase_began)
        self._phase_began = now
        self.context.trace.phase_changed(before, self.state)
        if before is Phase.COLLECTING:
            self.tasks.stop_timer(ev.DeadlinePassed)
            self.run_status.upload_stored()
        if before is Phase.SELECTING:
            self.tasks.stop_timer(ev.RetryDue)
        self.watchers.publish(Progress("phase", self.state.phase.value))

    # Writes to the ledger.

    async def write(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a writing method of the store. Retries while the disk is full or the database is away."""
        return await self.retry(lambda: self.context.services.ledger.do(method, *args, **kwargs))

    async def read(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a reading method of the store, with the same retries."""
        return await self.write(method, *args, **kwargs)

    async def retry(self, work: Callable[[], Awaitable[R]]) -> R:
        """Await any other work that needs the disk or the ledger, with the same retries."""
        return await write_when_possible(self.run_status.writing_failed, work)

    # Clients.

    def fleet_changed(self) -> None:
        """Wake the loop: the set of present clients may have changed."""
        if self._events.empty():
            self._events.put_nowait(None)

    def broadcast(self, digest: bytes) -> Broadcast | None:
        """The broadcast with that digest, if clients can fetch it now: a bundle or a difference."""
        sent = chain(self.model.broadcasts, self.client_evaluations.broadcasts())
        return next((found for each in sent if (found := each.named(digest)) is not None), None)
