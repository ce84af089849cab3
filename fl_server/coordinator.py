"""All runs of one coordinator: made, read back after a restart, found by name, and told about the fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace

import structlog

from algorithms import AlgorithmError
from fl_server import events as ev
from fl_server.broadcast import Broadcast
from fl_server.engine import Engine, build_algorithm, complete
from fl_server.errors import InvalidInput, NoSuchResource, NoSuchRun, RunExists, WrongState
from fl_server.outcomes import OutcomeLookup, uncounted_outcome
from fl_server.parts import Parts
from fl_server.read_back import read_back
from fl_server.round_state import Phase
from fl_server.round_work import (
    CARRY_OUT,
    reattached,
)
from fl_server.run import Behaviour, Run
from fl_server.run_config import RunConfig, from_values
from fl_server.runs.due_restarts import restart_if_due
from fl_server.store.base import HistoryRecord, RunRecord, StoreError
from fl_server.store.checkpoints import INITIAL
from protos.codec import digest_text
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey, Outcome, RefusalReason
from tasks import TaskError, fingerprint, load_task

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
        self._not_loaded: set[str] = set()
        """Runs of the ledger whose task or configuration this program cannot use: their ids are taken."""
        self._creating = asyncio.Lock()
        self._outcomes = OutcomeLookup(parts.ledger)
        parts.metrics.watch_runs(self.runs)

    async def start(self) -> None:
        """Read every run back and go on with those that had not ended."""
        self._parts.fleet.listener = self
        for record in await self._parts.ledger.do(self._parts.ledger.store.runs):
            try:
                run = await self._make(record, from_values(dict(record.spec)))
            except (TaskError, InvalidInput, AlgorithmError) as error:
                log.error("run_not_loaded", run=record.run_id, error=str(error))
                self._not_loaded.add(record.run_id)
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
            run = await self._make(record, config)
            # What a crash in this place may have left behind under the id.
            await self._parts.in_compute(self._parts.checkpoints.remove_run, run_id)
            await run.model.load()
        except TaskError as error:
            raise InvalidInput("task", "a task that this server can load", str(error)) from error
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
        taken = self._runs.keys() | self._not_loaded
        if config.name in taken:
            raise RunExists(config.name)
        if config.name:
            return config.name
        base, number = config.base_id(), 1
        while f"{base}-{number}" in taken:
            number += 1
        return f"{base}-{number}"

    async def _make(self, record: RunRecord, config: RunConfig) -> Run:
        algorithm = build_algorithm(config)
        task = await self._parts.in_compute(load_task, config.task.name, config.task.options)
        behaviour = Behaviour(fingerprint(task), algorithm, lambda: Engine(config, task), CARRY_OUT)
        return Run(self._parts, record, config, behaviour)

    # For operators.

    async def pause(self, run: Run, actor: str) -> None:
        """No new round after the one under way."""
        _require(run, "pausing", "running", "waiting")
        await run.do(ev.PauseRequested(), _why(run, actor, "run_paused"))

    async def resume(self, run: Run, actor: str) -> None:
        """Rounds go on."""
        _require(run, "resuming", "paused")
        await run.do(ev.ResumeRequested(), _why(run, actor, "run_resumed"))

    async def stop(self, run: Run, reason: str, actor: str) -> None:
        """End the run; the round under way is given up, unless its step has begun."""
        _require(run, "stopping", "running", "waiting", "paused")
        reason = reason or "an operator stopped it"
        await run.do(ev.EndRequested("stopped", reason), _why(run, actor, "run_stop_requested", reason))
        await run.over(_STOP_S)

    async def extend(self, run: Run, rounds: int, wall_time_s: float, actor: str) -> None:
        """More rounds, more time; a completed run goes on."""
        _require(run, "extending", "running", "waiting", "paused", "completed")
        total = run.state.rounds + rounds
        if total <= run.state.round:
            raise InvalidInput("rounds", f"rounds over 0: all {run.state.round} of the run are done", rounds)
        limit = run.config.stop.wall_time_s
        if limit:
            limit = max(limit, run.record.elapsed_s) + wall_time_s
        stop = run.config.stop.model_copy(update={"rounds": total, "wall_time_s": limit})
        config, record = run.config, run.record
        run.config = config.model_copy(update={"stop": stop})
        spec = run.config.model_dump(exclude_none=True)
        run.record = replace(record, spec=spec, extended_at=run.state.round)
        try:
            if run.ended and run.behaviour.algorithm.keeps_client_state:
                lost = "the run was over, so its clients' states are gone"
                await run.do(ev.StatesLost(lost), _why(run, actor, "run_reopened"))
            await run.do(ev.Extended(total), _why(run, actor, "run_extended", f"to {total} rounds"))
        except (StoreError, WrongState):
            run.config = config
            run.record = replace(run.record, spec=record.spec, extended_at=record.extended_at)
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
        if wanted.isascii() and wanted.isdigit() and int(wanted) in kept:
            return int(wanted)
        shown = ", ".join(str(round_) for round_ in kept if round_ >= 0) or "none yet"
        raise InvalidInput("round", f'"latest", "best" or a kept round ({shown})', repr(wanted))

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
            elif run_id not in self._not_loaded and (run is None or run.ended):
                key = ExchangeKey(run_id=run_id, round=round_, exchange=exchange)
                epoch = run.record.state_epoch if run else 0
                outcomes.append(uncounted_outcome(key, RefusalReason.REFUSAL_REASON_ABANDONED, epoch))
        for (run_id, exchange), rounds in wanted.items():
            outcomes += await self._outcomes.of(self._runs[run_id], exchange, rounds, client)
        return outcomes

    def forgets(self, run_id: str) -> bool:
        """Whether what a client keeps for a run is of no use any more: the run is over, or none of this coordinator."""
        run = self._runs.get(run_id)
        return run_id not in self._not_loaded and (run is None or run.ended)

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


def _require(run: Run, what: str, *allowed: str) -> None:
    if run.status not in allowed:
        raise WrongState(run.id, run.status, allowed, what)


def _why(run: Run, actor: str, event: str, detail: str = "") -> HistoryRecord:
    return HistoryRecord(time.time(), actor, event, run.id, detail)
