"""The invariants of a life of depth 1: after each event, at a restart, and at its end. Each raises AssertionError."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fl_server.rounds.state import Phase, RoundState
from tests.deterministic.core_driver import DEADLINE_S, Driver
from tests.deterministic.core_ledger import digest

_RESULTS = (Phase.REDUCING, Phase.STEPPING, Phase.COMMITTING)
"""Phases in which the accepted list is fixed."""


def check_state(driver: Driver) -> None:
    """After the effects of an event."""
    state, ledger = driver.state, driver.ledger
    assert state.round == len(ledger.commits) or state.phase is Phase.COMMITTING, f"the state is in {state.round}"
    assert state.out <= state.drawn, f"out {state.out} of {state.drawn}"
    if state.refused:
        assert not state.refused.keys() & set(state.arrivals.clients()), "a refused update counts"
    if state.policy.population:
        may_count = state.members | (state.drawn - state.out)
        assert len(may_count) <= state.policy.population, "more clients than the population"
    if state.phase is Phase.COLLECTING:
        assert state.working or state.fixed, "a round collects, and no client works"
        assert driver.deadline is not None, "a round collects without a deadline"
    if state.phase is Phase.SELECTING and state.goal and state.settled:
        assert driver.retries, "a round waits for clients, and will not be tried again"
    if state.collects:
        rows = ledger.updates.get((state.round, state.exchange), {})
        assert rows == dict(state.admitted), "the admitted updates are not those of the ledger"
        assert rows.keys() <= state.drawn, "an update of a client counts that was not drawn"


def check_restored(before: RoundState, after: RoundState) -> None:
    """A restart at rest leaves all as it was that decides."""
    same = ["round", "exchange", "state_epoch", "rounds", "paused"]
    if before.phase in _RESULTS:
        assert after.fixed == before.accepted, f"the fixed list {after.fixed} is not {before.accepted}"
    else:
        same += ["epoch_rounds", "members", "lost"]
    if before.phase is Phase.COLLECTING and not before.fixed:
        same += ["phase", "goal", "refused", "failed", "restarts", "attempt"]
        same += [] if before.repeated else ["admitted", "drawn"]
    if before.policy.stop.uses_metrics:
        same += ["judged", "judged_from"]
    if before.phase is Phase.EVALUATING:  # one of an earlier round is awaited only where it had begun before
        was, now = before.awaited - {"earlier"}, after.awaited - {"earlier"}
        assert was == now, f"the evaluations {set(was)} were awaited before a restart, and {set(now)} after it"
    for name in same:
        was, now = _plain(getattr(before, name)), _plain(getattr(after, name))
        assert was == now, f"{name} was {was} before a restart in {before.phase.value}, and is {now} after it"


def check_deadline(driver: Driver) -> None:
    """When a deadline passes: the coordinator was up for the whole time that it gives."""
    used = driver.clock.up - driver.told.opened
    assert used >= DEADLINE_S, f"a deadline passed after {used:g} of {DEADLINE_S:g} s in which the coordinator was up"


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else tuple(value) if isinstance(value, list) else value


def check_end(driver: Driver, faults: Collection[str]) -> None:
    """At the end of the run. faults: the kinds that happened."""
    ledger, state, told = driver.ledger, driver.state, driver.told
    if state.phase is not Phase.ENDED:
        return
    assert state.ending is not None, "the run has ended without a reason"
    may_fail = {"refuse", "fail", "culprits"} & set(faults)
    assert ledger.status == "completed" or may_fail, f"the run has {ledger.status}: {ledger.reason}"
    model = b"first"
    for round_ in range(len(ledger.commits)):
        _check_round(driver, round_, model)
        model = ledger.commits[round_][0]
    for (round_, exchange, client), made in told.acknowledged.items():
        if round_ < len(ledger.commits):
            rows = ledger.updates.get((round_, exchange), {})
            assert rows.get(client) == made, f"the update of {client} in round {round_} was acknowledged and lost"
    assert told.announced <= len(ledger.commits), "a round was announced that is not committed"
    _check_reason(driver)


def _check_round(driver: Driver, round_: int, model: bytes) -> None:
    """A committed round. model: the one that its clients got."""
    ledger, policy = driver.ledger, driver.state.policy
    committed, accepted, epoch, _ = ledger.commits[round_]
    last, where = policy.exchanges - 1, f"round {round_}"
    clients = [client for client, _ in accepted]
    assert clients == sorted(set(clients)), f"{where} counts {clients}"
    assert len(clients) >= policy.min_accepted, f"{where} has {len(clients)} updates"
    cohorts = {client for exchange, _, cohort in ledger.attempts[round_] if exchange == last for client in cohort}
    assert set(clients) <= cohorts, f"{where} counts {clients} and asked {cohorts}"
    if policy.sampling == "fixed" and not last:
        least = min(policy.quorum or (policy.clients_per_round + 1) // 2, policy.clients_per_round)
        assert len(clients) >= min(least, len(cohorts)), f"{where} closed with {len(clients)} of {least}"
        assert len(clients) <= policy.clients_per_round, f"{where} counts {len(clients)} updates"
    for client, made in accepted:
        assert made == digest(client, round_, last, epoch, model), f"{where}: {client} trained from another"
        assert ledger.updates[round_, last].get(client) == made, f"{where}: {client} was not admitted"
    assert committed == digest(model, accepted), f"{where}: another model was committed"


def _check_reason(driver: Driver) -> None:
    """The run ended for the first reason there was."""
    ledger, policy = driver.ledger, driver.state.policy
    done = len(ledger.commits)
    if ledger.status != "completed":
        return
    target = policy.stop.target
    if ledger.reason.endswith("rounds are done"):
        assert done == ledger.rounds, f"{done} of {ledger.rounds} rounds, and {ledger.reason}"
    if target is not None:
        reached = [round_ for round_, found in ledger.metrics.items() if found["loss"] <= target]
        judged = [round_ for round_ in reached if round_ >= ledger.judged_from]
        assert not judged or judged[0] >= done - 1, f"the target was reached in {judged}, and {done} rounds follow"
    if policy.evaluate_every == 1:
        assert len(ledger.metrics) == done, f"{len(ledger.metrics)} of {done} rounds were evaluated"
