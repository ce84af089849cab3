"""Back into the same round: a run's state, read from its ledger and spool after a restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from fl_server.round_drawing import goal_of
from fl_server.round_state import Phase, RoundState
from fl_server.store.base import AttemptRecord, HistoryRecord, Store, UpdateRecord

log = structlog.get_logger()
IsWhole = Callable[[UpdateRecord], bool]


def recover_round(store: Store, run_id: str, fresh: RoundState, is_whole: IsWhole) -> RoundState:
    """The round under way as the ledger has it; blocking.

    Args:
        store: the ledger.
        run_id: the run.
        fresh: the run's state at the start of that round.
        is_whole: whether an admitted update's bytes are on disk as the ledger says. One whose bytes are torn or gone is
            dropped from the ledger, so that the client is asked for it again.
    """
    attempts = store.attempts(run_id, fresh.round)
    if not attempts:
        return fresh
    exchange = max(attempt.exchange for attempt in attempts)
    fresh = replace(fresh, first_attempt=min(attempt.attempt for attempt in attempts))
    state = _reopened(fresh, [attempt for attempt in attempts if attempt.exchange == exchange])
    admitted = [(update.client_id, update.digest) for update in _whole(store, run_id, state, is_whole)]
    fixed = store.accepted(run_id, state.round, exchange)
    if fixed is not None:
        # The list was fixed and the step had begun: the exchange is these updates, and no others.
        members = frozenset(client for client, _ in fixed)
        state = replace(state, goal=len(fixed), drawn=members, fixed=tuple(fixed))
        admitted = [entry for entry in fixed if entry in admitted]
    state = replace(state, admitted=tuple(admitted))
    log.info(
        "round_recovered", run=run_id, round=state.round, exchange=exchange, attempt=state.attempt,
        cohort=len(state.drawn), admitted=len(admitted),
    )  # fmt: skip
    return state


def _reopened(fresh: RoundState, attempts: Sequence[AttemptRecord]) -> RoundState:
    """COLLECTING, with everybody who was told to deliver."""
    first = attempts[0].cohort
    exchange = attempts[0].exchange
    return replace(
        fresh,
        phase=Phase.COLLECTING,
        exchange=exchange,
        attempt=attempts[-1].attempt,
        goal=len(first) if exchange else goal_of(fresh.policy, first),
        drawn=frozenset(client for attempt in attempts for client in attempt.cohort),
    )


def _whole(store: Store, run_id: str, state: RoundState, is_whole: IsWhole) -> list[UpdateRecord]:
    """The admitted updates whose bytes are there, in order of arrival."""
    whole = []
    for update in store.updates(run_id, state.round, state.exchange):
        if update.admitted and is_whole(update):
            whole.append(update)
        elif update.admitted:
            why = HistoryRecord(
                time.time(), "coordinator", "update_dropped", run_id,
                f"round {state.round}, {update.client_id}: its bytes are torn or gone; it is asked for again",
            )  # fmt: skip
            log.warning("update_dropped", run=run_id, round=state.round, client=update.client_id)
            store.drop_update(run_id, state.round, state.exchange, update.client_id, why)
    return sorted(whole, key=lambda update: update.received_at)
