"""Step, commit, evaluation, and the end after the last round."""

from __future__ import annotations

import pytest

from fl_server.rounds.effects import Announce, Commit, ComputeStep, EndRun, OpenAttempt
from fl_server.rounds.events import Evaluated, ModelCommitted, RosterChanged, Source, StepComputed
from fl_server.rounds.machine import advance
from fl_server.rounds.sampling import RoundPolicy
from fl_server.rounds.state import Phase, RoundState
from tests.fl_server.round_play import ALL, COMMIT, accepted, arrive, collecting, play


def test_a_round_is_durable_before_it_is_announced() -> None:
    """The step, the commit, the announcement and the next draw follow in this order."""
    state, commands = play(collecting("a"), *arrive("a"), *COMMIT)
    assert commands == [
        ComputeStep(accepted("a")), Commit(), Announce(0, evaluate=True), OpenAttempt(1, 0, 0, ("a",)),
    ]  # fmt: skip
    assert (state.round, state.accepted, state.admitted) == (1, (), ())


@pytest.mark.parametrize(("every", "due"), [(0, ""), (1, "0123"), (2, "13"), (3, "23"), (9, "3")])
def test_which_rounds_are_evaluated(every: int, due: str) -> None:
    """Of rounds 0 to 3 every n-th is evaluated, and always the last one, unless evaluation is off."""
    state, evaluated = collecting("a", rounds=4, evaluate_every=every), ""
    while state.phase is Phase.COLLECTING:
        state, commands = play(state, *arrive("a"), *COMMIT)
        evaluated += "".join(str(c.round) for c in commands if isinstance(c, Announce) and c.evaluate)
    assert evaluated == due


def test_the_last_round_is_evaluated_before_the_end() -> None:
    """The run does not end with an evaluation under way."""
    state, commands = play(collecting("a", rounds=1), *arrive("a"), *COMMIT)
    assert (state.phase, commands[-1]) == (Phase.EVALUATING, Announce(0, evaluate=True))
    assert advance(state, Evaluated())[1] == (EndRun("completed", "1 round is done"),)


def test_a_run_without_evaluation_ends_at_its_last_commit() -> None:
    """With evaluation off there is no wait."""
    assert play(collecting("a", rounds=1, evaluate_every=0), *arrive("a"), *COMMIT)[0].phase is Phase.ENDED


def test_the_next_round_can_wait_for_the_evaluation() -> None:
    """With await_evaluation the draw comes after the evaluation, not during it."""
    state, _ = play(collecting("a", await_evaluation=True), *arrive("a"), *COMMIT)
    assert state.phase is Phase.EVALUATING
    assert advance(state, Evaluated())[1] == (OpenAttempt(1, 0, 0, ("a",)),)


@pytest.mark.parametrize(("every", "due"), [(0, ""), (1, "0123"), (3, "23"), (9, "3")])
def test_which_rounds_clients_are_asked_about(every: int, due: str) -> None:
    """Of rounds 0 to 3 every n-th and the last, independent of the server's evaluations; no draw waits for them."""
    state, asked = collecting("a", rounds=4, ask_clients_every=every, evaluate_every=0), ""
    while state.phase is Phase.COLLECTING:
        state, commands = play(state, *arrive("a"), *COMMIT)
        asked += "".join(str(c.round) for c in commands if isinstance(c, Announce) and c.ask_clients)
    assert asked == due
    assert state.phase is (Phase.EVALUATING if every else Phase.ENDED)


def test_the_next_round_can_wait_for_the_clients() -> None:
    """With await_clients the clients' evaluation starts the draw, and the server's does not."""
    state, _ = play(collecting("a", ask_clients_every=1, await_clients=True), *arrive("a"), *COMMIT)
    assert (state.phase, state.awaited) == (Phase.EVALUATING, frozenset({"clients"}))
    state, commands = advance(state, Evaluated("server"))
    assert (state.phase, commands) == (Phase.EVALUATING, ())
    assert advance(state, Evaluated("clients"))[1] == (OpenAttempt(1, 0, 0, ("a",)),)


def test_the_last_round_waits_for_both() -> None:
    """Server and clients, in either order, then the end."""
    state, _ = play(collecting("a", rounds=1, ask_clients_every=5), *arrive("a"), *COMMIT)
    orders: tuple[tuple[Source, Source], ...] = (("server", "clients"), ("clients", "server"))
    for first, second in orders:
        half, commands = advance(state, Evaluated(first))
        assert (half.phase, commands) == (Phase.EVALUATING, ())
        assert advance(half, Evaluated(second))[1] == (EndRun("completed", "1 round is done"),)


def test_a_restart_after_the_last_commit_draws_no_further_round() -> None:
    """A run that is restored with all its rounds done ends when the roster arrives."""
    restored = RoundState(RoundPolicy(seed=7), rounds=3, round=3)
    assert play(restored, RosterChanged(ALL, settled=True))[1] == [EndRun("completed", "3 rounds are done")]


def test_a_second_evaluation_waits_for_the_first() -> None:
    """The next round is not drawn before: else the models that wait for their evaluation would pile up."""
    stepping = play(collecting("a", rounds=9), *arrive("a"), StepComputed())[0]
    state, commands = play(stepping, ModelCommitted(evaluating=True))
    assert (state.phase, commands) == (Phase.EVALUATING, [Announce(0, evaluate=True)])
    state, commands = play(state, Evaluated("earlier"))
    assert (state.phase, [type(each) for each in commands]) == (Phase.COLLECTING, [OpenAttempt])


@pytest.mark.parametrize(
    ("event", "phase"),
    [
        pytest.param(Evaluated("server", 0), Phase.COLLECTING, id="the earlier one"),
        pytest.param(Evaluated("server", 1), Phase.EVALUATING, id="the newest one"),
        pytest.param(Evaluated("clients", 0), Phase.EVALUATING, id="by clients"),
    ],
)
def test_an_evaluation_that_ends_while_a_round_is_committed_is_the_earlier_one(event: Evaluated, phase: Phase) -> None:
    """It ended before the commit was processed, and its event comes after it: the run must not wait for ever."""
    state = play(collecting("a", rounds=9), *arrive("a"), *COMMIT)[0]
    state = play(state, *arrive("a"), StepComputed(), ModelCommitted(evaluating=True))[0]
    assert (state.phase, state.round, state.awaited) == (Phase.EVALUATING, 2, frozenset({"earlier"}))
    assert advance(state, event)[0].phase is phase


def test_a_round_without_an_evaluation_waits_for_none() -> None:
    """An earlier evaluation goes on during the next round."""
    stepping = play(collecting("a", rounds=9, evaluate_every=2), *arrive("a"), StepComputed())[0]
    assert play(stepping, ModelCommitted(evaluating=True))[0].phase is Phase.COLLECTING
