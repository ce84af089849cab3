"""All runs of one coordinator: made, read back after a restart, found by name, and told about the fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import structlog

from algorithms import AlgorithmError
from fl_server import events as ev
from fl_server.broadcast import Broadcast
from fl_server.engine import Engine, build_algorithm, complete
from fl_server.errors import InvalidInput, NoSuchResource, NoSuchRun, RunExists, WrongState, one_line
from fl_server.outcomes import OutcomeLookup, uncounted_outcome
from fl_server.parts import Parts
from fl_server.read_back import load_again, read_back
from fl_server.round_state import Phase
from fl_server.round_work import (
    CARRY_OUT,
    reattached,
)
from fl_server.run import Behaviour, Run
from fl_server.run_config import RunConfig, from_stored
from fl_server.runs.audit import Audit
from fl_server.runs.due_restarts import restart_if_due
from fl_server.runs.extension import extended
from fl_server.runs.not_loaded import NotLoadedRuns
from fl_server.runs.task_loading import LoadedTask, load_allowed, not_loadable
from fl_server.store.base import HistoryRecord, RunRecord, StoreError, StoreFull
from fl_server.store.checkpoints import INITIAL
from protos.codec import digest_text
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey, Outcome, RefusalReason
from tasks import TaskError

log = structlog.get_logger()

_STOP_S = 10.0
"""How long an operator who stops a run waits for a step under way to be committed."""
MOST_LOOKED_UP = 256
"""Updates of a client that are looked up for one registration; daemons keep one or two for each run."""
_FOR_GOOD = ("banned", "forgotten")


class Coordinator:
    """The runs, by id. Lives on the event loop; the fleet's listener."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._runs: dict[str, Run] = {}
        self.not_loaded = NotLoadedRuns()
        self.audit = Audit(parts.ledger)
        self._creating = asyncio.Lock()
        self._reopening = asyncio.Lock()
        self._outcomes = OutcomeLookup(parts.ledger)
        parts.metrics.watch_runs(self.runs)

    async def start(self) -> None:
        """Read every run back and go on with those that had not ended."""
        self._parts.fleet.listener = self
        for record in await self._parts.ledger.do(self._parts.ledger.store.runs):
            try:
                config = from_stored(record.spec)
                run = self._make(record, config, await self._load_task(config))
            except (TaskError, InvalidInput, AlgorithmError) as error:
                log.error("run_not_loaded", run=record.run_id, error=str(error))
                self.not_loaded.add(record, str(error))
                continue
            self._runs[run.id] = run
            await read_back(run)

    async def close(self) -> None:
        """Stop all runs where they are."""
        await asyncio.gather(*(run.close() for run in self._runs.values()))

    def runs(self) -> list[Run]:
        """All runs, oldest first."""
        return list(self._runs.values())

    def run(self, run_id: str) -> Run:
        """A run by id. Raises NoSuchRun."""
        run = self._runs.get(run_id)
        if run is None:
            self.not_loaded.refuse(run_id)
            raise NoSuchRun(run_id)
        return run

    def resource(self, digest: bytes) -> tuple[Run, Broadcast]:
        """What is being sent out under a digest, and for which run. Raises NoSuchResource."""
        for run in self._runs.values():
            if broadcast := run.resource(digest):
                return run, broadcast
        raise NoSuchResource(digest_text(digest))

    async def create(self, config: RunConfig, actor: str) -> Run:
        """Check everything that can be checked, store the run, and let it wait for its clients."""
        async with self._creating:  # or two at once would take one id
            return await self._create(config, actor)

    async def _create(self, config: RunConfig, actor: str) -> Run:
        run_id = self._free_id(config)
        try:
            config = complete(config)
            record = RunRecord(run_id, config.model_dump(exclude_none=True), "waiting", "", time.time())
            run = self._make(record, config, await self._task_for(run_id, config, actor))
            # What a crash in this place may have left behind under the id.
            await self._parts.in_compute(self._parts.checkpoints.remove_run, run_id)
            await run.model.load()
        except TaskError as error:
            raise not_loadable(error) from error
        except ValueError as error:
            raise InvalidInput("algorithm", "an algorithm with its parameters", str(error)) from error
        why = HistoryRecord(time.time(), actor, "run_created", run_id, f"{config.task.name}, {config.algorithm.name}")
        await self._parts.ledger.do(self._parts.ledger.store.create_run, record, why)
        self._runs[run_id] = run
        for client_id in self._parts.fleet.present():
            self._tell_misfit(run, client_id)
        log.info("run_created", run=run_id, actor=actor, task=config.task.name, algorithm=config.algorithm.name)
        run.begin()
        return run

    def _free_id(self, config: RunConfig) -> str:
        taken = {*self._runs, *self.not_loaded}
        if config.name in taken:
            raise RunExists(config.name)
        if config.name:
            return config.name
        base, number = config.base_id(), 1
        while f"{base}-{number}" in taken:
            number += 1
        return f"{base}-{number}"

    async def _task_for(self, run_id: str, config: RunConfig, actor: str) -> LoadedTask:
        """The task of a run that an operator wants; a refusal is in the history."""
        try:
            return await self._load_task(config)
        except InvalidInput as error:
            await self.audit.run_refused(actor, run_id, config.task.name, str(error))
            raise

    async def _load_task(self, config: RunConfig) -> LoadedTask:
        return await self._parts.in_compute(load_allowed, config.task, self._parts.config.tasks)

    def _make(self, record: RunRecord, config: RunConfig, task: LoadedTask) -> Run:
        algorithm = build_algorithm(config)
        behaviour = Behaviour(task.fingerprint, algorithm, lambda current: Engine(current, task.task), CARRY_OUT)
        return Run(self._parts, record, config, behaviour)

    # For operators.

    async def pause(self, run: Run, actor: str) -> None:
        """No new round after the one under way."""
        _require(run, "pausing", "running", "waiting")
        await run.do(ev.PauseRequested(), _why(run, actor, "run_paused"))

    async def resume(self, run: Run, actor: str, learning_rate: float = 0.0) -> None:
        """Rounds go on; of a failed run from its last committed model, with another learning rate if that is over 0."""
        async with self._reopening:  # or the second of two calls would change what the first has begun with
            _require(run, "resuming", "paused", "failed")
            if run.ended:
                await self._go_on(run, ev.ResumeRequested(), _resumed(run, learning_rate), actor)
            elif learning_rate:
                expected = "none for a run that is paused: only a failed one gets another"
                raise InvalidInput("learning_rate", expected, f"{learning_rate:g}")
            else:
                await run.do(ev.ResumeRequested(), _why(run, actor, "run_resumed"))

    async def stop(self, run: Run, reason: str, actor: str) -> None:
        """End the run; the round under way is given up, unless its step has begun."""
        _require(run, "stopping", "running", "waiting", "paused")
        reason = one_line(reason) or "an operator stopped it"
        await run.do(ev.EndRequested("stopped", reason), _why(run, actor, "run_stop_requested", reason))
        await run.over(_STOP_S)

    async def extend(self, run: Run, rounds: int, wall_time_s: float, actor: str) -> None:
        """More rounds, more time; a completed run goes on."""
        _require(run, "extending", "running", "waiting", "paused", "completed")
        longer = extended(run.config, run.record, rounds, wall_time_s)
        total = longer.stop.rounds
        if total <= run.state.round:
            raise InvalidInput("rounds", f"rounds over 0: all {run.state.round} of the run are done", rounds)
        await self._go_on(run, ev.Extended(total), Changed(longer, "run_extended", f"to {total} rounds"), actor)

    async def _go_on(self, run: Run, event: ev.Event, changed: Changed, actor: str) -> None:
        """Take an event with another configuration; a run that has ended begins anew with it."""
        config, record = run.config, run.record
        run.config = changed.config
        spec = run.config.model_dump(exclude_none=True)
        run.record = replace(record, spec=spec, extended_at=run.state.round)
        try:
            await _loaded(run)
            if run.ended and run.behaviour.algorithm.keeps_client_state:
                lost = "the run was over, so its clients' states are gone"
                await run.do(ev.StatesLost(lost), _why(run, actor, "run_reopened"))
            await run.do(event, _why(run, actor, changed.event, changed.detail))
        except (StoreError, WrongState, InvalidInput):
            run.config = config
            run.record = replace(run.record, spec=record.spec, extended_at=record.extended_at)
            if run.ended:
                run.model.unload()
            raise
        await run.save_status()
        run.begin()

    async def model_round(self, run: Run, wanted: str) -> int:
        """The round that "latest", "best" or a number means. Raises InvalidInput, NoSuchRun."""
        best, latest = run.log.best, run.log.latest
        if wanted == "best" and best is not None:
            return best.round
        if wanted in ("latest", "best"):
            return latest.round if latest else INITIAL
        kept = await self._parts.in_compute(self._parts.checkpoints.rounds, run.id)
        # Compared as text: a number of a million digits is no number to Python, and none of these.
        if (found := {str(round_): round_ for round_ in kept if round_ >= 0}.get(wanted)) is not None:
            return found
        shown = ", ".join(str(round_) for round_ in kept if round_ >= 0) or "none yet"
        raise InvalidInput("round", f'"latest", "best" or a kept round ({shown})', repr(wanted[:100]))

    # For clients.

    async def outcomes(self, keys: Iterable[ExchangeKey], client: str) -> list[Outcome]:
        """What became of a client's updates, of those that are decided.

        Of keys that are asked about twice one is answered, and MOST_LOOKED_UP at most are looked up in the ledger: the
        client asks about the others when it registers again.
        """
        outcomes: list[Outcome] = []
        wanted: dict[tuple[str, int], list[int]] = {}
        unique = dict.fromkeys((key.run_id, key.exchange, key.round) for key in keys)
        looked_up = 0
        for run_id, exchange, round_ in unique:
            run = self._runs.get(run_id)
            if run is not None and round_ in run.log.commits:
                looked_up += 1
                if looked_up <= MOST_LOOKED_UP:
                    wanted.setdefault((run_id, exchange), []).append(round_)
            elif run_id not in self.not_loaded and (run is None or run.ended):
                key = ExchangeKey(run_id=run_id, round=round_, exchange=exchange)
                epoch = run.record.state_epoch if run else 0
                outcomes.append(uncounted_outcome(key, RefusalReason.REFUSAL_REASON_ABANDONED, epoch))
        for (run_id, exchange), rounds in wanted.items():
            outcomes += await self._outcomes.of(self._runs[run_id], exchange, rounds, client)
        return outcomes

    def forgets(self, run_id: str) -> bool:
        """Whether what a client keeps for a run is of no use any more: the run is over, or none of this coordinator."""
        run = self._runs.get(run_id)
        return run_id not in self.not_loaded and (run is None or run.ended)

    def client_attached(self, client_id: str) -> None:
        """A client can be reached: push what it still has to do."""
        for run in self._runs.values():
            run.client_evaluations.reattached(client_id)
            if not run.ended:
                reattached(run, client_id)
                self._tell_misfit(run, client_id)
            elif client_id in run.client_states.members:
                self._parts.fleet.push(client_id, pb.AttendResponse(run_ended=pb.RunEnded(run_id=run.id)))

    def client_available(self, client_id: str) -> None:
        """A client may train again: what it gave up meanwhile, and what is still wanted, it is asked for once more."""
        for run in self._runs.values():
            if not run.ended:
                reattached(run, client_id)

    def _tell_misfit(self, run: Run, client_id: str) -> None:
        """A client that has the run's task in another version is never drawn for it: say so at both ends."""
        name, (version, source) = run.config.task.name, run.behaviour.fingerprint
        for offer in self._parts.fleet.record(client_id).tasks:
            if offer["name"] == name and (offer["version"], offer["source"]) != (version, source):
                text = (
                    f"run {run.id!r} needs task {name!r} in version {version!r} ({source[:15]}), this client has "
                    f"{offer['version']!r} ({offer['source'][:15]}): install the coordinator's version of the task"
                )
                log.warning("task_differs", run=run.id, client=client_id, why=text)
                self._parts.fleet.push(client_id, pb.AttendResponse(notice=pb.Notice(text=text)))

    def client_gone(self, client_id: str, reason: str) -> None:
        """A client is not waited for any more."""
        for run in self._runs.values():
            run.intake.client_out(client_id, "lost", reason)
            run.client_evaluations.gone(client_id)
            if reason == "forgotten":
                run.client_states.drop(client_id)
            if reason in _FOR_GOOD and not run.ended and client_id in run.state.members:
                run.post(ev.StatesLost(f"{client_id} was {reason}, and with it its state"))
        if reason in _FOR_GOOD:
            self._parts.io.submit(self._remove_unfinished, client_id)

    def _remove_unfinished(self, client_id: str) -> None:
        """What a client that is gone for good had sent of its uploads; in a worker thread."""
        try:
            self._parts.spool.remove_unfinished(client_id)
        except StoreError as error:
            log.warning("not_removed", client=client_id, error=str(error))

    def client_released(self, client_id: str) -> None:
        """An operator lets a client take part again: also in runs that it was left out of."""
        for run in self._runs.values():
            run.client_states.release(client_id)
            run.look_again()
            restart_if_due(run, at_once=run.state.phase is Phase.SELECTING)

    def fleet_changed(self) -> None:
        """Who may be drawn may have changed."""
        for run in self._runs.values():
            if not run.ended:
                run.fleet_changed()


@dataclass(frozen=True, slots=True)
class Changed:
    """With what configuration a run goes on, and how the history names it."""

    config: RunConfig
    event: str
    detail: str


async def _loaded(run: Run) -> None:
    """Raises InvalidInput where the models of an ended run cannot be read any more."""
    try:
        await load_again(run)
    except StoreFull:
        raise
    except StoreError as error:
        raise InvalidInput("run_id", "a run whose committed models can be read", str(error)) from error


def _resumed(run: Run, learning_rate: float) -> Changed:
    if not learning_rate:
        return Changed(run.config, "run_resumed", f"from round {run.state.round} on")
    local = run.config.local.with_rate(learning_rate, run.state.round)
    detail = f"from round {run.state.round} on, with learning rate {learning_rate:g}"
    return Changed(run.config.model_copy(update={"local": local}), "run_resumed", detail)


def _require(run: Run, what: str, *allowed: str) -> None:
    if run.status not in allowed:
        raise WrongState(run.id, run.status, allowed, what)


def _why(run: Run, actor: str, event: str, detail: str = "") -> HistoryRecord:
    return HistoryRecord(time.time(), actor, event, run.id, detail)
