"""What operators are told of the clients of a run: in its history, in the log, and by a note on the client.

Each client is named once. Nothing else follows: nothing is decided by these warnings.

The state of a member that left never changes again, so the run stops short of the optimum, and no metric of the run
shows it. Operators are warned once for each absence. Forgetting the client restarts the states without it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import structlog

from fl_common.units import counted
from fl_server.privacy_accounts import Stated
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.run.totals import Share
from fl_server.store.records import ClientEvaluation, HistoryRecord

log = structlog.get_logger()


async def warn_of_low_shares(context: RunContext, control: RunControl) -> None:
    """Warn, after a commit and a restart, of clients that have too few of the counted updates."""
    shares, event = context.rounds.shares, "client_below_due"
    shares.look()
    if control.config.record_privacy is not None:
        counted = (client for client, share in shares.by_client.items() if share.counted)
        context.rounds.stated = Stated.of(map(context.fleet.work.of, counted))
    if shares.too_low:
        if shares.told is None:
            shares.told = await _told_of(context, control, event)
        close = control.config.round.close
        new = sorted(shares.too_low.keys() - shares.told, key=str.encode)
        whys = {client: below_due(context.run_id, client, shares.too_low[client], close) for client in new}
        for client, why in whys.items():
            await context.fleet.records.write_note(client, why)
        _tell_once(context, event, whys, shares.told)


async def warn_of_label_order(context: RunContext, control: RunControl, answers: Sequence[ClientEvaluation]) -> None:
    """Warn, after an evaluation by clients, of those that stay at chance while the others learn."""
    order, event = context.label_order, "labels_suspected"
    if behind := order.compare(answers):
        if order.told is None:
            order.told = await _told_of(context, control, event)
        whys = {
            client: f"its own accuracy stays at {accuracy:.2f}, the median of the others is {usual:.2f}: does it number"
            " the classes as they do?"
            for client, accuracy, usual in behind
        }
        for client, why in whys.items():
            await context.fleet.records.write_note(client, f"run {context.run_id}: {why}")
        _tell_once(context, event, {client: f"{client}: {why}" for client, why in whys.items()}, order.told)


async def _told_of(context: RunContext, control: RunControl, event: str) -> set[str]:
    """The clients that lines of an event in the run's history begin with.

    A kill may prevent a line that is written in the background. So the history says who was told of, also after a
    restart.
    """
    details = await control.read(context.store.history_details, context.run_id, event)
    return {detail.split(maxsplit=1)[0].removesuffix(":") for detail in details if detail}


def _tell_once(context: RunContext, event: str, whys: Mapping[str, str], told: set[str]) -> None:
    """Log warnings and write them to the history, but for clients that were told of. `whys` begin with the client."""
    for client, why in whys.items():
        if client not in told:
            told.add(client)
            log.warning(event, run=context.run_id, client=client, why=why)
            row = HistoryRecord(time.time(), "coordinator", event, context.run_id, why)
            context.fleet.records.write_history_later(row)


def below_due(run_id: str, client: str, share: Share, close: str) -> str:
    """The problem, and what to do about it."""
    remedy = f"`fl clients show {client}` has its latest work"
    if close == "goal":
        remedy = 'others are faster; close = "cohort" waits for it, and over_selection near 1 prefers them less'
    return (
        f"{client} has {counted(share.counted, 'counted update')} in run {run_id} and is due {share.due:.1f}, "
        "so the model learns "
        f"little of its data: {remedy}"
    )


INTERVALS = 3
"""A client that is drawn at random waits longer than so many times the usual interval in one of twenty cases."""


def missing_members(context: RunContext, control: RunControl) -> dict[str, int]:
    """Members that cannot be drawn now, with the committed rounds since they took part last, if these are many."""
    states = context.client_states
    if control.ended or not context.algorithm.needs_population or not states.members:
        return {}
    after, rounds = rounds_until_missing(context, control), context.rounds.committed
    away = {client: missed for client, missed in states.rounds_missed(rounds).items() if missed >= after}
    if not away:
        return {}
    requires = control.eligible.requires
    here = set(context.fleet.eligibility.able_clients(requires)) - states.left_out
    return {client: missed for client, missed in away.items() if client not in here}


def rounds_until_missing(context: RunContext, control: RunControl) -> int:
    """Committed rounds without a member after which it is missing: several times the usual interval."""
    population = control.config.population
    share = control.state.policy.drawn_of(population) / population
    return max(context.services.config.states.missing_after, math.ceil(INTERVALS / min(1.0, share)))


async def warn_of_missing_members(context: RunContext, control: RunControl) -> None:
    """Update the missing members after a commit, and warn of those that are newly missing."""
    missing, states = missing_members(context, control), context.client_states
    states.missing = frozenset(missing)
    new = [client for client in missing if not states.warned(client)]
    if not new:
        return
    now, last, run_id = time.time(), context.rounds.committed - 1, context.run_id
    whys = [
        HistoryRecord(now, "coordinator", "member_missing", run_id, absent(run_id, client, missing[client]))
        for client in new
    ]
    warned = [states.after_warning(client, last) for client in new]
    await control.write(context.store.put_client_state_records, warned, None, whys)
    states.keep(warned)
    log.warning(
        "members_missing", run=run_id, round=last, clients=len(new), first=min(new),
        why=absent(run_id, min(new), missing[min(new)]),
    )  # fmt: skip
    for client in new:
        await context.fleet.records.write_note(client, absent(run_id, client, missing[client]))


def absent(run_id: str, client: str, rounds: int) -> str:
    """The problem, and what to do about it."""
    return (
        f"{client} has taken no part in run {run_id} for {counted(rounds, 'committed round')} and cannot be "
        "drawn, but its client "
        f"state is part of the run's sum, which keeps the model from its optimum: if it does not come back, "
        f"`fl clients forget {client}` restarts the states without it"
    )
