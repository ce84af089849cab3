"""The checks of a life of depth 1: after each event, at a restart, and at its end. Each raises AssertionError.

What is violated begins with the check's name and a colon. `invariants.py` has the names with what they stand for.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fl_server.rounds.committing import awaited_evaluations
from fl_server.rounds.state import BEFORE_MASKS, Phase, RoundState
from tests.deterministic import core_buffer
from tests.deterministic.core_driver import Driver
from tests.deterministic.core_ledger import digest
from tests.deterministic.core_stages import update_of

_RESULTS = (Phase.REDUCING, Phase.STEPPING, Phase.COMMITTING)
"""Phases in which the accepted list is fixed."""
_ALWAYS = ("round", "exchange", "state_epoch", "rounds", "paused")
_OF_EPOCH = ("epoch_rounds", "members", "lost")
_OF_ROUND = ("phase", "goal", "refused", "failed", "restarts", "attempt")
_OF_UPDATES = ("admitted", "drawn")
_OF_METRICS = ("judged", "judged_from")
"""Fields of the state that a restart keeps, each where it decides something."""


def check_state(driver: Driver) -> None:
    """After the effects of an event."""
    state, ledger = driver.state, driver.ledger
    assert state.round == len(ledger.commits), f"round after the last commit: {state.round}, not {len(ledger.commits)}"
    assert state.out <= state.drawn, f"only drawn clients are out: {state.out} of {state.drawn}"
    if state.refused:
        counts = state.refused.keys() & set(state.arrivals.clients())
        assert not counts, f"no refused update counts: {counts}"
    if state.policy.population:
        may_count = state.members | (state.drawn - state.out)
        assert len(may_count) <= state.policy.population, f"population has its limit: {may_count}"
    if state.phase is Phase.COLLECTING or state.staged:
        waits = state.unanswered or (state.phase is Phase.SHARING and state.graph is None)
        works = waits if state.staged else state.working or state.fixed
        assert works, f"somebody works while a round collects: nobody in {state.phase.value}"
        timed = driver.deadline is not None or state.policy.buffered
        assert timed, "a round that collects has a deadline: none"
    if state.phase is Phase.SELECTING and (state.goal or state.resting) and state.settled:
        assert driver.retries, "a round that waits is tried again: never"
    if state.policy.private and state.phase is not Phase.ENDED:
        charged, most = len(ledger.charged), state.policy.most_draws
        assert state.draws == charged, f"each draw is counted: {state.draws}, not {charged}"
        assert charged <= most or not most, f"a budget ends the run: {charged} draws of {most}"
        opened = len(ledger.attempts.get(state.round, ()))
        assert opened <= 1, f"a private round is drawn once: {opened} attempts of round {state.round}"
    if state.policy.buffered:
        core_buffer.check_state(ledger, state)
    elif state.under_way:
        rows = ledger.updates.get((state.round, state.exchange), {})
        assert rows == dict(state.admitted), f"admitted as in the ledger: {state.admitted}, not {rows}"
        assert rows.keys() <= state.drawn, f"only drawn clients count: {rows.keys()} of {state.drawn}"


def check_restored(before: RoundState, after: RoundState) -> None:
    """A restart at rest leaves all as it was that decides."""
    same: tuple[str, ...] = _ALWAYS
    if before.policy.buffered:
        core_buffer.check_restored(before, after)
        same += ("phase", "goal", "attempt") if before.phase is Phase.COLLECTING else ()
    elif before.phase in _RESULTS:
        fixed = after.accepted if before.policy.secure else after.fixed
        assert fixed == before.accepted, f"a restart keeps the fixed list: {fixed}, not {before.accepted}"
    else:
        same += _OF_EPOCH
    if before.phase is Phase.COLLECTING and not before.fixed and not before.policy.buffered:
        same += _OF_ROUND
        same += () if before.repeated else _OF_UPDATES
    if before.policy.secure and before.phase is not Phase.ENDED:
        same += _check_stage(before, after)
    if before.policy.stop.uses_metrics:
        same += _OF_METRICS
    if before.policy.private:
        same += ("draws",)
    if before.phase is Phase.EVALUATING:
        # One of an earlier round is awaited only where it had begun before, and one of the last round not any more
        # where the run was extended in it.
        due = awaited_evaluations(before, before.round - 1)
        was, now = before.awaited & due, after.awaited & due
        assert was == now, f"a restart keeps the awaited evaluations: {set(now)}, not {set(was)}"
    for name in same:
        was, now = _plain(getattr(before, name)), _plain(getattr(after, name))
        assert was == now, f"a restart keeps {name}: in {before.phase.value} {now}, not {was}"


def _check_stage(before: RoundState, after: RoundState) -> tuple[str, ...]:
    """What a restart keeps of a stage and of the number of draws. An answer that is written may count again."""
    if before.phase in _RESULTS:
        return ()
    graphs = (before.graph in (None, after.graph), after.graph)
    assert graphs[0], f"a restart keeps the graph of shares: {graphs[1]}, not {before.graph}"
    gone = before.answered - after.answered - after.out
    assert not gone, f"a restart keeps answers: not those of {sorted(gone)} in {before.phase.value}"
    # A failure after the masked update is not told from one before it: its client is asked once more.
    kept = [name for name in _OF_ROUND if name != "failed" or before.phase in BEFORE_MASKS]
    return ("attempt", "sharers", *((*kept, *_OF_UPDATES) if before.staged else ()))


def check_deadline(driver: Driver) -> None:
    """When a deadline passes: the coordinator was up for the whole time that it gives."""
    used = driver.clock.up - driver.told.opened
    gives = driver.told.gives
    assert used >= gives, f"a deadline gives its time while up: {used:g} of {gives:g} s"


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else tuple(value) if isinstance(value, list) else value


def check_end(driver: Driver, faults: Collection[str]) -> None:
    """At the end of the run. faults: the kinds that happened."""
    ledger, told = driver.ledger, driver.told
    may_fail = {"refuse", "fail", "culprits"} & set(faults) or driver.state.policy.on_drop == "end"
    assert ledger.status == "completed" or may_fail, f"no run fails without a cause: {ledger.status}, {ledger.reason}"
    model = b"first"
    for round_ in range(len(ledger.commits)):
        _check_round(driver, round_, model)
        model = ledger.commits[round_][0]
    for (round_, exchange, client), made in told.acknowledged.items():
        if round_ < len(ledger.commits):
            rows = ledger.updates.get((round_, exchange), {})
            assert rows.get(client) == made, f"acknowledged updates stay: that of {client} in round {round_} does not"
    if ledger.status == "completed":
        _check_reason(driver)


def _check_round(driver: Driver, round_: int, model: bytes) -> None:
    """A committed round. model: the one that its clients got."""
    ledger, policy = driver.ledger, driver.state.policy
    if policy.buffered:
        core_buffer.check_round(ledger, policy, round_)
        return
    committed, accepted, epoch, _ = ledger.commits[round_]
    last = policy.exchanges - 1
    clients = [client for client, _ in accepted]
    assert clients == sorted(set(clients)), f"accepted lists are in order: that of round {round_} is {clients}"
    assert len(clients) >= policy.min_accepted, f"a model has its fewest updates: round {round_} has {len(clients)}"
    if policy.sampling == "fixed" and not last:
        goal = policy.goal_of(ledger.attempts[round_][0][2])
        quorum = min(policy.quorum or (goal + 1) // 2, goal)
        assert len(clients) >= quorum, f"a round closes with a quorum: round {round_} with {len(clients)} of {quorum}"
        assert len(clients) <= policy.clients_per_round, f"a round has its goal: round {round_} counts {len(clients)}"
    for client, made in accepted:
        rows = ledger.updates[round_, last]
        assert rows.get(client) == made, f"admitted updates are accepted: {client} in round {round_} was not admitted"
        right = update_of(driver.state, client, (round_, last), epoch, model, ledger.attempts[round_][-1][1])
        assert made == right, f"updates are of the round's model: {client} trained another in round {round_}"
    assert committed == digest(model, accepted), f"a model is that of its list: round {round_} has another"


def _check_reason(driver: Driver) -> None:
    """The run was completed for the first reason there was."""
    ledger, policy = driver.ledger, driver.state.policy
    done, target = len(ledger.commits), policy.stop.target
    if ledger.reason.endswith((" rounds are done", "1 round is done")):
        assert done == ledger.rounds, f"a run has all of its rounds: {done} of {ledger.rounds}"
    if target is not None:
        reached = [round_ for round_, found in ledger.metrics.items() if found["loss"] <= target]
        judged = [round_ for round_ in reached if round_ >= ledger.judged_from]
        assert not judged or judged[0] >= done - 1, f"a target ends the run: it was reached in {judged} of {done}"
    if policy.evaluate_every == 1:
        assert len(ledger.metrics) == done, f"each due round is evaluated: {len(ledger.metrics)} of {done}"
