"""What operators do to runs: pause, resume, stop, extend. Each is written to the ledger with its actor."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import structlog

from algorithms import AlgorithmError
from fl_common.units import counted
from fl_server.errors import InvalidInput, WrongState, one_line
from fl_server.rounds import events as ev
from fl_server.run.restore import reload_ended
from fl_server.run.run import Run
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.sections import MAX_COUNT, MAX_SECONDS
from fl_server.runs.creation import RunLoading
from fl_server.runs.table import RunTable, require_state
from fl_server.store.errors import StoreError, StoreFull
from fl_server.store.records import HistoryRecord
from fl_tasks import TaskError

log = structlog.get_logger()

_STOP_S = 10.0
"""How long a call that stops a run waits for a model that is being computed to be committed."""


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """The configuration that a run continues with, and its line of history."""

    config: RunConfig
    event: str
    detail: str


def extended(config: RunConfig, elapsed_s: float, rounds: int, wall_time_s: float) -> RunConfig:
    """The configuration with so many more rounds and seconds. Raises InvalidInput for more than a run can have.

    The seconds are added to the limit or, if the run went on beyond it, to the time that it has used.
    """
    if rounds > MAX_COUNT - config.stop.rounds:
        most = MAX_COUNT - config.stop.rounds
        raise InvalidInput("rounds", f"at most {most:,} more, for a run has {MAX_COUNT:,} at most", f"{rounds:,}")
    limit = config.stop.wall_time_s
    used = max(limit, elapsed_s) if limit else 0.0
    if not (math.isfinite(wall_time_s) and 0 <= wall_time_s <= MAX_SECONDS - used):
        raise InvalidInput("wall_time_s", f"0 to {MAX_SECONDS - used:g} seconds more", wall_time_s)
    more = {"rounds": config.stop.rounds + rounds, "wall_time_s": used + wall_time_s if limit else limit}
    return config.model_copy(update={"stop": config.stop.model_copy(update=more)})


def resumed(config: RunConfig, round_: int, learning_rate: float) -> Reconfiguration:
    """The configuration of a failed run that continues from a round on. learning_rate: 0 to leave it as it is."""
    if not learning_rate:
        return Reconfiguration(config, "run_resumed", f"from round {round_} on")
    local = config.local.with_rate(learning_rate, round_)
    detail = f"from round {round_} on, with learning rate {learning_rate:g}"
    return Reconfiguration(config.model_copy(update={"local": local}), "run_resumed", detail)


class RunActions:
    """Actions on the runs of one coordinator. `actor` is the operator, as history shows it."""

    def __init__(self, table: RunTable, loading: RunLoading) -> None:
        self._table, self._loading = table, loading

    async def pause(self, run: Run, actor: str) -> None:
        """Start no new round after the one under way."""
        require_state(run, "pausing", "running", "waiting")
        await run.in_turn(run.take_request(ev.PauseRequested(), _why(run, actor, "run_paused")))

    async def resume(self, run: Run, actor: str, learning_rate: float = 0.0) -> None:
        """Continue the rounds; a failed run from its last committed model. learning_rate: 0 to keep the run's own."""
        await run.in_turn(self._resume(run, actor, learning_rate))

    async def _resume(self, run: Run, actor: str, learning_rate: float) -> None:
        require_state(run, "resuming", "paused", "failed")
        if run.ended:
            async with self._continuing(run):
                change = resumed(run.config, run.state.round, learning_rate)
                await _continue(run, ev.ResumeRequested(), change, actor)
        elif learning_rate:
            expected = "none for a run that is paused: only a failed one gets another"
            raise InvalidInput("learning_rate", expected, f"{learning_rate:g}")
        else:
            await run.take_request(ev.ResumeRequested(), _why(run, actor, "run_resumed"))

    async def stop(self, run: Run, reason: str, actor: str) -> None:
        """End the run. The round under way is abandoned, unless its model is already being computed."""
        require_state(run, "stopping", "running", "waiting", "paused")
        await run.in_turn(_stop(run, one_line(reason) or "an operator stopped it", actor))
        await run.wait_until_ended(_STOP_S)

    async def extend(self, run: Run, rounds: int, wall_time_s: float, actor: str) -> None:
        """Give the run more rounds and more time. A completed run continues."""
        # In one turn from reading the configuration to writing it: a second call adds to the first.
        await run.in_turn(self._extend(run, rounds, wall_time_s, actor))

    async def _extend(self, run: Run, rounds: int, wall_time_s: float, actor: str) -> None:
        require_state(run, "extending", "running", "waiting", "paused", "completed")
        async with self._continuing(run):
            longer = extended(run.config, run.state.elapsed_s, rounds, wall_time_s)
            total = longer.stop.rounds
            if total <= run.state.round:
                raise InvalidInput("rounds", f"rounds over 0: all {run.state.round} of the run are done", rounds)
            event = ev.Extended(total, longer.stop.wall_time_s)
            await _continue(run, event, Reconfiguration(longer, "run_extended", f"to {counted(total, 'round')}"), actor)

    @asynccontextmanager
    async def _continuing(self, run: Run) -> AsyncIterator[None]:
        """The run goes on with another configuration, which the block gives it; one that has ended starts again.

        If that fails, the run is as it was. The caller holds the run's turn.
        """
        self._table.require(run)
        config, record = run.config, run.record
        try:
            await self._loading.code(run.id, config)
            await _reload(run)
            if run.ended and (account := await self._loading.account(run.id, config)) is not None:
                run.take_account(account.check())
            yield
        except (StoreError, WrongState, InvalidInput):
            run.config = config
            run.run_status.change(spec=record.spec, extended_at=record.extended_at, load_failure=record.load_failure)
            if run.ended:
                run.model.unload()
            raise
        run.start()


async def _stop(run: Run, reason: str, actor: str) -> None:
    why = _why(run, actor, "run_stop_requested", reason)
    await run.take_request(ev.EndRequested("stopped", reason), why, replace(run.record, stopping=reason))


async def _continue(run: Run, event: ev.Event, change: Reconfiguration, actor: str) -> None:
    """Process an event with another configuration. The caller holds the run's turn."""
    run.config, ended = change.config, run.ended
    if ended:
        run.model.reconfigure(change.config)
    spec = run.config.model_dump(exclude_none=True)
    run.run_status.change(spec=spec, extended_at=run.state.round, load_failure="", stopping="")
    if ended and run.context.keeps_client_state:
        lost = "the run was over, so its clients' states are gone"
        await run.take_request(ev.StatesLost(lost), _why(run, actor, "run_reopened"))
    written = None if ended else run.record  # an ended run is written with its next state
    await run.take_request(event, _why(run, actor, change.event, change.detail), written)


async def _reload(run: Run) -> None:
    """Raises InvalidInput if the models of an ended run cannot be read any more, or its code fails."""
    try:
        await reload_ended(run)
    except StoreFull:
        raise
    except StoreError as error:
        raise InvalidInput("run_id", "a run whose committed models can be read", str(error)) from error
    except (TaskError, AlgorithmError) as error:
        raise InvalidInput("run_id", "a run whose code can be loaded", str(error)) from error


def _why(run: Run, actor: str, event: str, detail: str = "") -> HistoryRecord:
    return HistoryRecord(time.time(), actor, event, run.id, detail)
