"""One run's life: feeds the round state machine with events, and carries out its commands.

Events come from the fleet, from uploads, from operators and from the run's own work; they are taken one at a time.
What takes long (step, commit, evaluation) runs beside that and comes back as an event. The order of writes is what
makes a crash harmless: a cohort is in the ledger before anybody is told, an update before it is acknowledged, a
checkpoint before its round is announced.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import structlog

import algorithms as fl
from fl_server import events as ev
from fl_server.broadcast import Broadcast
from fl_server.client_evaluation import ClientEvaluations
from fl_server.client_states import ClientStates
from fl_server.deadline import Deadline, keep_all, keep_up
from fl_server.engine import Engine
from fl_server.errors import WrongState
from fl_server.intake import Intake
from fl_server.model_line import ModelLine
from fl_server.norms import NormHistory
from fl_server.parts import Parts
from fl_server.progress import Progress, RoundLog, Watchers
from fl_server.round_rule import UnexpectedEvent
from fl_server.round_state import Phase, RoundState
from fl_server.round_trace import RoundTrace
from fl_server.rounds import advance
from fl_server.run_config import RunConfig
from fl_server.store.base import HistoryRecord, RunRecord, StoreTaken
from fl_server.tally import Tally

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What a run is given to do its work with."""

    fingerprint: tuple[str, str]
    """(version, source) of the task that clients must have."""
    algorithm: fl.Algorithm
    make_engine: Callable[[RunConfig], Engine]
    carry_out: Mapping[type, Callable[[Run, Any], Awaitable[None]]]
    """Command -> what does it."""


class Run:
    """A run's state and its loop. Lives on the event loop; `round_work.py` does what the commands say."""

    def __init__(self, parts: Parts, record: RunRecord, config: RunConfig, behaviour: Behaviour) -> None:
        self.parts = parts
        self.record = record
        self.config = config
        self.behaviour = behaviour
        self.watchers = Watchers()
        self.log = RoundLog(config.stop.metric)
        self.tally = Tally(parts.metrics, record.run_id, self.log)
        self.model = ModelLine(parts, record.run_id, lambda: behaviour.make_engine(self.config))
        algorithm = behaviour.algorithm
        population = config.population if algorithm.needs_population else 0
        self.state = RoundState(config.policy(len(algorithm.exchanges), population), config.stop.rounds)
        self.client_states = ClientStates(record.run_id, parts.config.states, summed=algorithm.needs_population)
        self.norms = NormHistory()
        self.waiting_for = ""
        """Why nothing goes on, in words; empty while something does."""
        self.cannot_write = self._waited_for = ""
        """Why nothing can be written, empty while it can; and what `waiting_for` was before that."""
        self.state_since = time.time()
        """When it came into its state; where that was before the coordinator's start: when it was read back."""
        self._state_seen = self.status
        self.deadline = Deadline(self)
        self.trace = RoundTrace(parts.traces, record.run_id)
        self.round_began = 0.0
        self.evaluation: asyncio.Task[None] | None = None
        self.client_evaluations = ClientEvaluations(self)
        self.intake = Intake(self)
        self.turn = asyncio.Lock()
        """Held by whoever takes an event: one at a time."""
        self._events: asyncio.Queue[ev.Event | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._timers: dict[type[ev.Event], asyncio.TimerHandle] = {}
        self._phase_began = time.monotonic()
        self._fleet_seen = -1
        self.held = False
        """The coordinator is going to stop: nobody gets work any more."""
        self._over = asyncio.Event()

    @property
    def id(self) -> str:
        """The run's id."""
        return self.record.run_id

    @property
    def status(self) -> str:
        """One of "waiting", "running", "paused", "completed", "stopped" or "failed"."""
        if self.ended and self.state.ending is not None:
            return self.state.ending[0]
        if self.state.paused:
            return "paused"
        return "waiting" if self.waiting_for else "running"

    @property
    def task(self) -> Mapping[str, str]:
        """Name, version and source of the task that clients must have."""
        version, source = self.behaviour.fingerprint
        return {"name": self.config.task.name, "version": version, "source": source}

    @property
    def remedy(self) -> str:
        """The command with which a run goes on whose training has led nowhere."""
        return f"fl run resume {self.id} --learning-rate {self.config.local.learning_rate_in(self.state.round) / 2:g}"

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self.state.phase is Phase.ENDED

    @property
    def stepping(self) -> bool:
        """Whether a step or commit is under way, which a stop of the coordinator should wait for."""
        return self.state.phase in (Phase.REDUCING, Phase.STEPPING, Phase.COMMITTING)

    # Its life.

    def begin(self) -> None:
        """Start taking events, and counting time where it is limited; what runs already goes on."""
        self.parts.metrics.told.goes_on(self.id)
        for name, work in (
            ("events", self._live),
            ("time", self._watch_wall_time),
            ("deadline", partial(keep_up, self)),
        ):
            if name not in self._running or self._running[name].done():
                self._running[name] = self.spawn(work())
        self.fleet_changed()

    async def close(self) -> None:
        """Stop working; everything that matters is on disk."""
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.trace.close()
        self.watchers.end()
        await keep_all(self)

    def hold(self) -> None:
        """Give nobody anything new: the coordinator is going to stop."""
        self.held = True
        self.look_again()
        self.fleet_changed()

    async def _live(self) -> None:
        """Take events until the run is over; `begin` starts it anew for a run that is extended."""
        while not self.ended:
            event = await self._events.get()
            try:
                async with self.turn:
                    await self._look_at_fleet()
                    if event is not None and self.applies(event):
                        await self._take(event)
            except Exception as error:  # noqa: BLE001 - told by _broken
                self._broken(error)
        while not self._events.empty():
            self._events.get_nowait()  # it was meant for the run that is over

    async def do(self, event: ev.Event, why: HistoryRecord) -> None:
        """Take an operator's event at once, with its line in the history.

        Raises WrongState where the run has just come to its end, or to another state that has no rule for it.
        """
        async with self.turn:
            await self._look_at_fleet()
            try:
                advance(self.state, event)
            except UnexpectedEvent as unexpected:
                raise WrongState(self.id, self.status, ("running",), why.event) from unexpected
            await self.parts.ledger.do(self.parts.ledger.store.add_history, why)
            log.info(why.event, run=self.id, actor=why.actor, detail=why.detail)
            await self._take(event)

    async def over(self, seconds: float) -> None:
        """Wait until the run has ended, for a while."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    def post(self, event: ev.Event) -> None:
        """Take an event when its turn comes; to a run that is over nothing happens any more."""
        if not self.ended:
            self._events.put_nowait(event)

    def fail(self, reason: str) -> None:
        """End the run by an error; the last committed model stays."""
        self.post(ev.EndRequested("failed", reason))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something beside the loop, for as long as the run lives; a failure ends the run."""
        task = asyncio.create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # one that was cancelled before it began
        return task

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - told by _broken
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        if isinstance(error, StoreTaken):
            return  # the coordinator is about to end, and nothing that it says holds any more
        log.error("run_failed", run=self.id, error=repr(error), exc_info=error)
        self.fail(f"a fault of the coordinator: {error!r}; see its log")

    def set_timer(self, seconds: float, event: ev.Event) -> None:
        """Post an event after a while, in place of an earlier timer for its kind."""
        self.stop_timer(type(event))
        self._timers[type(event)] = asyncio.get_running_loop().call_later(seconds, self.post, event)

    def stop_timer(self, kind: type[ev.Event]) -> None:
        """Forget a timer."""
        if timer := self._timers.pop(kind, None):
            timer.cancel()

    def applies(self, event: ev.Event) -> bool:  # noqa: PLR0911 - a table
        """Whether what was posted still means something: the round may have moved on in between."""
        state = self.state
        match event:
            case ev.UpdateAdmitted(client):
                known = any(client == other for other, _ in state.admitted)
                return state.collects and client in state.drawn and not known
            case ev.ClientOut(client):
                return state.phase is Phase.COLLECTING and client in state.outstanding
            case ev.ClientBack(client):
                return state.phase in (Phase.COLLECTING, Phase.SELECTING) and client in state.out
            case ev.DeadlinePassed():
                return state.phase is Phase.COLLECTING
            case ev.RetryDue():
                return state.phase is Phase.SELECTING and state.goal > 0
            case ev.Evaluated():
                return state.phase is Phase.EVALUATING
            case ev.StatesLost(_, epoch):
                return not self.ended and epoch in (None, self.record.state_epoch)
        return not self.ended

    async def _look_at_fleet(self) -> None:
        """Tell the state who may be drawn, until that is how it is: other runs draw while this one waits."""
        fleet = self.parts.fleet
        while not self.ended and self._fleet_seen != fleet.version:
            self._fleet_seen = fleet.version
            eligible, settled = self.eligible(), fleet.settled and not self.held
            if (eligible, settled) != (self.state.eligible, self.state.settled):
                await self._take(ev.RosterChanged(eligible, settled))

    async def look(self) -> None:
        """Look at the roster at once, and at who may be drawn from it: the caller has the turn."""
        self.look_again()
        await self._look_at_fleet()

    async def take(self, event: ev.Event) -> None:
        """Take an event that applies at once: the caller has the turn. A failure ends the run."""
        try:
            await self._take(event)
        except Exception as error:  # noqa: BLE001 - told by _broken
            self._broken(error)

    async def _take(self, event: ev.Event) -> None:
        before = self.state
        self.state, commands = advance(before, event)
        self._reserve()
        if self.state.phase is not before.phase:
            self._phase_changed(before.phase)
        for command in commands:
            await self.behaviour.carry_out[type(command)](self, command)
        if self.ended:
            self._over.set()
            self._events.put_nowait(None)  # an operator may have ended it: the loop sees so, and ends too
        else:
            self._over.clear()
        if isinstance(event, ev.UpdateAdmitted):
            self.watchers.tell(Progress("admitted", event.client))
        if self.record.state != self.status:
            await self.save_status()

    def _reserve(self) -> None:
        """Before anything is awaited: no other run may draw the clients that work for this one."""
        fleet = self.parts.fleet
        up_to_date = self._fleet_seen == fleet.version
        fleet.workforce.work_for(self.id, self.state.outstanding)
        if up_to_date:
            self._fleet_seen = fleet.version

    def _phase_changed(self, before: Phase) -> None:
        now = time.monotonic()
        self.tally.phase(before, now - self._phase_began)
        self._phase_began = now
        self.trace.phase_changed(before, self.state)
        if before is Phase.COLLECTING:
            self.stop_timer(ev.DeadlinePassed)
        if before is Phase.SELECTING:
            self.stop_timer(ev.RetryDue)
        self.watchers.tell(Progress("phase", self.state.phase.value))

    async def save_status(self, event: str = "") -> None:
        """Write down how the run stands, with a line of history if `event` names one."""
        self._note_state()
        reason = self.state.ending[1] if self.ended and self.state.ending else self.waiting_for
        ended_at = time.time() if self.ended else None
        self.record = replace(self.record, state=self.status, reason=reason, ended_at=ended_at)
        why = HistoryRecord(time.time(), "coordinator", event, self.id, reason) if event else None
        await self.parts.ledger.insist(self.no_room, self.parts.ledger.store.update_run, self.record, why)
        self.watchers.tell(Progress("state", reason))

    def no_room(self, why: str) -> None:
        """The disk is full or read-only, or the database away: say so, and when it is over, for which `why` is "".

        Whoever wanted to write tries again, and nothing is lost.
        """
        if why:
            self._waited_for = self._waited_for if self.cannot_write else self.waiting_for
            self.cannot_write, self.waiting_for = why, f"the coordinator cannot write: {why}"
            log.error("no_room", run=self.id, round=self.state.round, error=why)
            self.spawn(self.parts.make_room())
        elif self.cannot_write:
            log.info("room_again", run=self.id, round=self.state.round)
            told = HistoryRecord(time.time(), "coordinator", "run_goes_on", self.id, f"before: {self.waiting_for}")
            self.cannot_write, self.waiting_for = "", self._waited_for
            self.spawn(self._explain(told))
        self._note_state()
        self.watchers.tell(Progress("state", self.waiting_for))

    def _note_state(self) -> None:
        if self.status != self._state_seen:
            self._state_seen, self.state_since = self.status, time.time()

    async def _explain(self, why: HistoryRecord) -> None:
        await self.parts.ledger.insist(self.no_room, self.parts.ledger.store.add_history, why)

    async def _watch_wall_time(self) -> None:
        """Count the time that the run is not paused; end it at its limit."""
        began = time.monotonic()
        while self.config.stop.wall_time_s and not self.ended:
            await asyncio.sleep(min(1.0, max(0.01, self.config.stop.wall_time_s - self.record.elapsed_s)))
            now = time.monotonic()
            if not self.state.paused:
                self.record = replace(self.record, elapsed_s=self.record.elapsed_s + now - began)
            began = now
            if self.record.elapsed_s >= self.config.stop.wall_time_s and self.state.ending is None:
                self.post(ev.EndRequested("completed", f"its {self.config.stop.wall_time_s:g} s are over"))
                return

    # For the fleet.

    def fleet_changed(self) -> None:
        """Look at the roster again."""
        if self._events.empty():
            self._events.put_nowait(None)

    def look_again(self) -> None:
        """Before the next event: the roster is as it was, but who may be drawn from it is not."""
        self._fleet_seen = -1

    def eligible(self) -> tuple[str, ...]:
        """Clients that could be drawn now."""
        eligible = self.parts.fleet.workforce.eligible(self.id, self.task, self.config.labels)
        never = self.intake.refused | self.client_states.kept_out(self.record.state_epoch)
        return tuple(client for client in eligible if client not in never) if never else eligible

    def resource(self, digest: bytes) -> Broadcast | None:
        """What is being sent out under that digest."""
        sent = chain(self.model.broadcasts, self.client_evaluations.broadcasts())
        return next((broadcast for broadcast in sent if broadcast.digest == digest), None)
