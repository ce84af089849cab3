"""A client reports that it has lost the state that its work must be done from: what that means for the run.

Where the server keeps the states' sum, all clients begin anew in the next state epoch. That costs everybody, so one
client can cause it only so often: the report must be about an assignment that named a state, it counts towards
quarantine, a client that reports it too often is left out of the run, and between two restarts rounds are committed.
Everything that decides this is in the ledger.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import structlog

from fl_server import events as ev
from fl_server.client_states import Lost
from fl_server.round_work import push_assignment
from fl_server.store.base import HistoryRecord, StateStanding
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey, RefusalReason

if TYPE_CHECKING:
    from fl_server.run import Run

log = structlog.get_logger()


class NoSuchLoss(Exception):
    """A report of a lost state that is about none; `str()` completes "expected ..., got STATE_LOST"."""


async def state_lost(run: Run, client: str, key: ExchangeKey, why: str) -> None:
    """Act on a report for the round under way. Raises NoSuchLoss, which counted as a fault and changed no state."""
    async with run.turn:
        if not await _is_at_work(run, client, key, why):
            return
        if run.client_states.of(client) is None:
            if run.client_states.may_cross(client):
                run.client_states.has_crossed(client)
                return  # the assignment that it has by now named no state, and it will answer that one too
            await _fault(run, client, why)
            await run.intake.failed_now(client, f"state_lost, and its assignment named no state: {why}")
            raise NoSuchLoss("another reason, for the assignment named no client state")
        lost = await _enter(run, Lost(client, run.record.state_epoch, run.state.round, why))
        await _act(run, lost)


async def _is_at_work(run: Run, client: str, key: ExchangeKey, why: str) -> bool:
    """Whether the report is about work that is wanted. Raises NoSuchLoss for work that the client cannot have had."""
    state = run.state
    reason = run.intake.refusal(key, client)
    if reason == RefusalReason.REFUSAL_REASON_LATE and (key.round, key.exchange) <= (state.round, state.exchange):
        return False  # coming late may happen to anybody
    if reason == RefusalReason.REFUSAL_REASON_BANNED:
        return False
    if reason is None and client in state.outstanding:
        return True
    if client in state.out or run.client_states.may_cross(client):
        return False  # the report came twice, or the work was cancelled meanwhile
    await _fault(run, client, why)
    raise NoSuchLoss("the client to be at work for that round")


async def _enter(run: Run, lost: Lost) -> StateStanding:
    """Write a loss down, with what stands against the client for it; a repeat is written once."""
    states, fleet = run.client_states, run.parts.fleet
    before, now = states.standing(lost.client), states.lost(lost)
    if now == before:
        return now
    standing, quarantined = fleet.quarantine.weigh_loss(lost.client, f"{_where(run)} (state_lost): {lost.why}")
    whys = [
        HistoryRecord(
            time.time(), f"client:{lost.client}", "state_lost", run.id,
            f"round {lost.round}, the {_nth(now.losses)} time: {lost.why}",
        ),
        *([] if quarantined is None else [quarantined]),
    ]  # fmt: skip
    if out := states.too_often(now):
        whys.append(HistoryRecord(time.time(), "coordinator", "client_left_out", lost.client, _left_out(run, now)))
    await run.parts.ledger.insist(run.no_room, run.parts.ledger.store.put_state_standings, [now], standing, whys)
    states.keep([now])
    run.parts.metrics.states_lost.labels(run.id).inc()
    log.warning("state_lost", run=run.id, round=lost.round, client=lost.client, losses=now.losses, why=lost.why)
    if standing is not None:
        fleet.keep_standing(standing, quarantined)
    if out:
        await _tell_left_out(run, now)
    else:
        await fleet.note(lost.client, f"state_lost in run {run.id} round {lost.round}: {lost.why}")
    return now


async def _act(run: Run, lost: StateStanding) -> None:
    """Restart the states, if it is time for that; else go on without the client."""
    states, client = run.client_states, lost.client_id
    out = client in states.left_out
    if run.behaviour.algorithm.needs_population:
        if states.may_restart(run.log.commits, run.record.state_epoch):
            if out:
                await run.look()  # before the round is drawn anew
            await run.take(ev.StatesLost(f"{client}: {lost.reason}"))
            return
        out = True  # until the restart
    else:
        states.forget(client)
    if out:
        await run.look()  # or it could be drawn as a replacement
        await run.intake.failed_now(client, f"state_lost: {lost.reason}")
    else:
        push_assignment(run, client)


async def _fault(run: Run, client: str, why: str) -> None:
    """A report that is about no state stands against the client; while it is quarantined no more is written down."""
    fleet, ledger = run.parts.fleet, run.parts.ledger
    if fleet.quarantine.of(client) is not None:
        return
    standing, quarantined = fleet.quarantine.weigh_loss(client, f"{_where(run)} (state_lost of no state): {why}")
    if standing is not None:
        await ledger.insist(run.no_room, ledger.store.put_standing, standing, quarantined)
        log.warning("state_lost_refused", run=run.id, round=run.state.round, client=client, why=why)
        fleet.keep_standing(standing, quarantined)
        await fleet.note(client, f"state_lost in run {run.id} round {run.state.round}, of no state: {why}")


async def _tell_left_out(run: Run, lost: StateStanding) -> None:
    why, client = _left_out(run, lost), lost.client_id
    log.warning("client_left_out", run=run.id, client=client, losses=lost.losses)
    notice = pb.Notice(text=f"the coordinator gives this client no work {why}")
    run.parts.fleet.push(client, pb.AttendResponse(notice=notice))
    await run.parts.fleet.note(client, f"gets no work {why}")


def _left_out(run: Run, lost: StateStanding) -> str:
    return (
        f"of run {run.id}: it lost its state {lost.losses} times, the last time in round {lost.lost_round}; "
        f"`fl clients release {lost.client_id}` ends that"
    )


def _where(run: Run) -> str:
    return f"the last one in run {run.id} round {run.state.round}"


def _nth(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
