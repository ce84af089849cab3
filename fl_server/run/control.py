"""What the parts of a run share: its state, the turn in which events are processed, its tasks and its ledger calls.

Events come from the fleet, from uploads, from operators and from the run's own work. They are processed one at a time
by the round state machine; the effects that result are carried out in order (`rounds/effects.py` has the contract).
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from algorithms import AlgorithmError
from fl_server.errors import RunBroke, WrongState
from fl_server.privacy_accounts import Account
from fl_server.rounds import effects
from fl_server.rounds import events as ev
from fl_server.rounds.machine import advance, applies
from fl_server.rounds.state import STAGES, Phase, RoundState, UnexpectedEvent
from fl_server.rounds.state import replace as replace_state
from fl_server.run.context import RunContext
from fl_server.run.eligible import EligibleClients
from fl_server.run.progress import Progress
from fl_server.run.record import RunStatus, RunTasks
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.spec import to_spec
from fl_server.store.errors import StoreTakenOver
from fl_server.store.records import HistoryRecord, RunRecord
from fl_tasks import TaskError
from protos.fl.v1.admin_pb2 import RunSpec

log = structlog.get_logger()

R = TypeVar("R")
T = TypeVar("T")


class RunControl(RunTasks):
    """A run as its parts see it. Lives on the event loop."""

    def __init__(self, context: RunContext, record: RunRecord, config: RunConfig) -> None:
        super().__init__(context.services.ledger)
        self.context = context
        self.config = config
        """The current configuration. Extending or resuming a run replaces it, so it is read at each use."""
        self.state = _first_state(context, record, config)
        self.account: Account | None = None
        """The privacy account of a private run, as it was at the last `take_account`."""
        self.unwritten = frozenset[str]()
        """Clients whose attempt is not in the ledger yet: they get their work when it is."""
        self.draining = False
        """Whether the coordinator is about to stop: no client gets new work."""
        self.run_status = RunStatus(context, self, record)
        self.turn = asyncio.Lock()
        """Held while an event is processed, so that the state cannot change in between."""
        self.eligible = EligibleClients(context, config, self.state)
        self._spec: tuple[RunConfig, RunSpec] | None = None
        self._events: asyncio.Queue[ev.Event | None] = asyncio.Queue()
        self._phase_began = time.monotonic()
        self._ended = asyncio.Event()

    def take_account(self, account: Account | None) -> None:
        """Go on with what the account allows now."""
        self.account = account
        if account is not None:
            policy = replace(self.state.policy, most_draws=account.most)
            self.state = replace_state(self.state, policy=policy, draws=account.own)

    @abstractmethod
    async def carry_out(self, effect: effects.Effect) -> None:
        """Do what the round state machine demands."""

    @property
    def id(self) -> str:
        """The run's id."""
        return self.context.run_id

    @property
    def record(self) -> RunRecord:
        """The run's row in the ledger."""
        return self.run_status.record

    @property
    def status(self) -> str:
        """One of "waiting", "running", "paused", "completed", "stopped" or "failed"."""
        return self.run_status.current

    @property
    def spec(self) -> RunSpec:
        """The current configuration for the wire. It is in each status, so each configuration is converted once."""
        if self._spec is None or self._spec[0] is not self.config:
            self._spec = self.config, to_spec(self.config)
        return self._spec[1]

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

    async def in_turn(self, work: Coroutine[Any, Any, R]) -> R:
        """Do work that holds the turn, to its end: also if the call that asked for it is cancelled."""
        return await self.to_the_end(self._holding_turn(work))

    async def _holding_turn(self, work: Coroutine[Any, Any, R]) -> R:
        try:
            async with self.turn:
                return await work
        finally:
            work.close()  # it has not begun if the run closes before its turn

    async def take_request(self, event: ev.Event, why: HistoryRecord, record: RunRecord | None = None) -> None:
        """Process an operator's event at once, with its line in the history. The caller holds `turn`.

        record: the run's row, if the request changes it; it is written together with the line.
        Raises WrongState if the run has just ended, or is in another state without a rule for the event; RunBroke if
        the run failed with it.
        """
        await self.update_roster()
        try:
            advance(self.state, event)
        except UnexpectedEvent as unexpected:
            raise WrongState(self.id, self.status, ("running",), why.event) from unexpected
        await self.run_status.request(why, record)
        log.info(why.event, run=self.id, actor=why.actor, detail=why.detail)
        if not await self.take(event):
            raise RunBroke(self.id, self.end_reason)

    async def wait_until_ended(self, seconds: float) -> None:
        """Wait until the run has ended, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()

    async def process_events(self) -> None:
        """Process events until the run is over. `start` starts it again for a run that is extended."""
        while not self.ended:
            event = await self._events.get()
            async with self.turn:
                try:
                    await self.update_roster()
                    if event is not None and self.applies(event):
                        await self._take(event)
                except Exception as error:  # noqa: BLE001 - whatever went wrong, the run fails with it
                    await self._break_by(error)
        while not self._events.empty():
            self._events.get_nowait()  # events for the run that is over

    # The roster.

    async def update_roster(self) -> None:
        """Pass the eligible clients to the state machine until they are current: other runs draw during each wait."""
        while not self.ended and (event := self.eligible.changed(self.state, draining=self.draining)):
            await self.take(event)

    async def refresh_roster(self) -> None:
        """Compute the eligible clients now. The caller holds the run's turn."""
        self.eligible.invalidate()
        await self.update_roster()

    def fleet_changed(self) -> None:
        """Wake the loop: the set of present clients may have changed."""
        if self._events.empty():
            self._events.put_nowait(None)

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

    def task_failed(self, error: Exception) -> None:
        """End the run with the error of a task."""
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
            await self.carry_out(command)
        self._note_end()
        if isinstance(event, ev.UpdateAdmitted):
            for client, _ in event.updates:
                self.context.watchers.publish(Progress("admitted", client))
        await self.run_status.save_if_changed()

    def _advance(self, event: ev.Event) -> tuple[effects.Effect, ...]:
        before = self.state
        self.state, commands = advance(before, event)
        for command in commands:
            if isinstance(command, effects.OpenAttempt):
                self.unwritten |= {*command.cohort, *self.stragglers(command)}
        self.eligible.reserve(self.state)
        if self.state.phase is not before.phase:
            self._phase_changed(before.phase)
        return commands

    def stragglers(self, attempt: effects.OpenAttempt) -> list[str]:
        """Clients of earlier attempts, which continue. With a buffer each draw has its own deadline: none."""
        return [] if self.state.policy.buffered else sorted(self.state.outstanding - set(attempt.cohort))

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
                await self.carry_out(command)
            except Exception as another:  # noqa: BLE001 - the other commands release what the run holds
                log.error("end_incomplete", run=self.id, command=type(command).__name__, error=repr(another))
        self.unwritten = frozenset()
        self._note_end()

    def _note_end(self) -> None:
        """Let the loop and the calls know that wait for the end of the run, or that it goes on."""
        if self.ended != self._ended.is_set():
            self.context.services.slots.note_end(self.id, over=self.ended)
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
        if before is Phase.COLLECTING or before in STAGES:
            self.stop_timer(ev.DeadlinePassed)
            self.run_status.upload_stored()
        if before is Phase.SELECTING:
            self.stop_timer(ev.RetryDue)
        self.context.watchers.publish(Progress("phase", self.state.phase.value))

    def writing_failed(self, why: str) -> None:
        """Show operators why the run waits, or that it goes on."""
        self.run_status.writing_failed(why)


def _first_state(context: RunContext, record: RunRecord, config: RunConfig) -> RoundState:
    """The state before the first round."""
    algorithm = context.algorithm
    settings = context.services.config
    policy = replace(
        config.policy(len(algorithm.exchanges), config.population if algorithm.needs_population else 0),
        rounds_between_restarts=settings.states.rounds_between_restarts,
        most_processes=settings.quarantine.restarts,
    )
    stop = config.stop
    return RoundState(
        policy, stop.rounds, state_epoch=record.state_epoch, wall_time_s=stop.wall_time_s, elapsed_s=record.elapsed_s
    )


TURN_ITEMS = 50
"""Items of a long list that are worked on without a turn for other calls in between: some milliseconds."""


async def with_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """The items of a long list. Other calls of the event loop get their turns in between."""
    for number, item in enumerate(items, start=1):
        yield item
        if number % TURN_ITEMS == 0:
            await asyncio.sleep(0)
