"""Rounds with secure aggregation: their stages, drop-outs in each of them, and the restart in each of them."""

from __future__ import annotations

from itertools import product

import pytest

from fl_server.rounds import effects as fx
from fl_server.rounds import events as ev
from fl_server.rounds.machine import advance, applies
from fl_server.rounds.restoring import SavedRound, restored_round, without_absent
from fl_server.rounds.selecting import next_round
from fl_server.rounds.state import STAGES, Phase, RoundState, replace
from tests.fl_server.round_play import accepted, agreeing, answer, arrive, full_graph, in_stages, leave, play

ORDER = (Phase.AGREEING, Phase.SHARING, Phase.COLLECTING, Phase.SIGNING, Phase.OPENING)


def test_a_round_goes_through_its_stages() -> None:
    """Each stage opens with those that answered the one before; the step has those whose masked updates came."""
    state, effects = play(agreeing(), *answer("abc"), full_graph("abc"), *answer("cab"), *arrive("bca"), *answer("ab"))
    state, more = play(state, *answer("bc"))
    stages = [(effect.stage, effect.members, effect.closed) for effect in effects if isinstance(effect, fx.OpenStage)]
    everybody = tuple("abc")
    assert stages == [
        ("sharing", everybody, everybody), ("collecting", everybody, everybody), ("signing", everybody, everybody),
        ("opening", everybody, ("a", "b")),
    ]  # fmt: skip
    assert (state.phase, more) == (Phase.STEPPING, [fx.ComputeStep(accepted("abc"))])


def test_a_large_cohort_tosses_coins() -> None:
    """Above the size of a full graph all members toss coins before they share; without one of them nobody can."""
    state, effects = play(agreeing(most_full=2), *answer("abc"))
    assert (state.phase, [type(effect) for effect in effects]) == (Phase.TOSSING, [fx.OpenStage])
    assert play(state, *answer("abc"))[0].phase is Phase.SHARING
    assert play(state, *answer("ab"), *leave("c"))[0].attempt == 1


@pytest.mark.parametrize("phase", ORDER)
def test_one_client_of_three_may_leave_in_any_stage(phase: Phase) -> None:
    """The others go on without it; its update counts if its masked update was here."""
    state = agreeing()
    for stage in ORDER:
        assert state.phase is stage
        if stage is phase:
            state = play(state, ev.ClientDroppedOut("c"))[0]
        here = sorted(client for client in state.drawn - state.out)
        events = arrive("".join(here)) if stage is Phase.COLLECTING else answer("".join(here))
        for event in events:
            if state.phase is stage and applies(event, state):
                state = play(state, event)[0]
        if state.phase is Phase.SHARING and state.graph is None:
            state = play(state, full_graph("abc"))[0]
    counted = "abc" if phase in {Phase.SIGNING, Phase.OPENING} else "ab"
    assert (state.phase, state.accepted) == (Phase.STEPPING, accepted(counted))


@pytest.mark.parametrize("phase", ORDER)
def test_a_round_that_has_lost_too_many_is_drawn_again(phase: Phase) -> None:
    """Two of three leave: all that the round had is discarded, and another attempt has a cohort of its own."""
    state = agreeing() if phase is Phase.AGREEING else in_stages("abc")[phase]
    state, effects = play(state, *leave("bc"), *(arrive("a") if phase is Phase.COLLECTING else answer("a")))
    assert (state.phase, state.round, state.attempt, state.admitted) == (Phase.AGREEING, 0, 1, ())
    assert (state.graph, state.sharers, state.answered) == (None, frozenset(), frozenset())
    kinds = [type(effect) for effect in effects if not isinstance(effect, fx.Cancel)]
    assert kinds == [fx.QuorumMissed, fx.RestartRound, fx.OpenAttempt]


def test_the_second_redraw_in_a_row_waits() -> None:
    """A cohort that fails at once is not drawn without end; the wait ends with RetryDue alone."""
    state = play(agreeing(), *leave("ab"), *answer("c"))[0]
    state, effects = play(state, *leave("ab"), *answer("c"))
    assert (state.phase, state.resting, type(effects[-1])) == (Phase.SELECTING, True, fx.RetryLater)
    state, effects = play(state, ev.RosterChanged(tuple("abc"), settled=True))
    assert effects == []
    state, effects = play(state, ev.RetryDue())
    assert (state.phase, [type(effect) for effect in effects]) == (Phase.AGREEING, [fx.OpenAttempt])


def test_on_drop_end_ends_the_run() -> None:
    """The run fails with the reason, and no other round is drawn."""
    state, effects = play(agreeing(on_drop="end"), *leave("ab"), *answer("c"))
    assert (state.phase, type(effects[-1])) == (Phase.ENDED, fx.EndRun)
    assert state.ending == (
        "failed",
        'round 0 was abandoned: 1 of 3 clients sent their keys; secure_aggregation.on_drop is "end"',
    )


def test_reasons_of_hidden_cohorts_name_no_client_and_no_number() -> None:
    """With privacy of clients who takes part, and how many, is told nobody: an abandoned round says why alone."""
    _, effects = play(agreeing(tells_clients=False), *leave("ab"), *answer("c"))
    assert [effect.why for effect in effects if isinstance(effect, fx.RestartRound)] == [
        "too few clients sent their keys"
    ]
    _, effects = play(agreeing(tells_clients=False), ev.RoundSpoiled("c: expected shares that give the secret"))
    [restart] = [effect for effect in effects if isinstance(effect, fx.RestartRound)]
    assert restart.why == "its answers or its sum cannot be used"


def test_deadlines_end_stages() -> None:
    """A stage ends at its deadline with those that answered, or the round is abandoned."""
    state = play(agreeing(), *answer("ab"))[0]
    state, effects = play(state, ev.DeadlinePassed())
    assert (state.phase, set(state.drawn)) == (Phase.SHARING, {"a", "b"})
    assert fx.Cancel(("c",), 0) in effects
    state, _ = play(state, full_graph("ab"), *answer("a"), ev.DeadlinePassed())
    assert (state.phase, state.attempt) == (Phase.AGREEING, 1)


def test_survivors_must_be_enough_for_the_plan() -> None:
    """A quorum of updates is not enough where the plan wants more survivors."""
    state = play(agreeing("abcd", quorum=2), *answer("abcd"), full_graph("abcd", threshold=3, quorum=3))[0]
    state, _ = play(state, *answer("abcd"), *arrive("ab"), *leave("cd"))
    assert (state.phase, state.attempt) == (Phase.AGREEING, 1)


def test_a_spoiled_sum_is_drawn_again() -> None:
    """The sum cannot be one of honest clients: the round has no model."""
    state = play(in_stages("abc")[Phase.OPENING], *answer("ab"))[0]
    state, effects = play(state, ev.RoundSpoiled("its norm is 9, over the clip of 1"))
    assert (state.phase, state.attempt) == (Phase.AGREEING, 1)
    assert next(effect for effect in effects if isinstance(effect, fx.RestartRound)).why.startswith("its norm is 9")


def saved_of(state: RoundState, stages: dict[str, tuple[str, ...]]) -> SavedRound:
    """What the ledger has of a round in this state."""
    fixed = state.accepted if state.phase is Phase.STEPPING else None
    return SavedRound(
        [(0, state.attempt, tuple("abcd"))], tuple(state.admitted), fixed, stages=stages, answered=state.answered,
        graph=state.graph,
    )  # fmt: skip


@pytest.mark.parametrize("leaver", ["", *"abcd"])
def test_a_restart_after_any_event_leads_to_the_same_round(leaver: str) -> None:
    """After each event of a round the state is restored from the ledger: what follows is the same, to the step."""
    events = [
        *answer("abcd"), full_graph("abcd", 3, 3), *answer("dcba"), *arrive("bdac"), *answer("cbad"), *answer("abcd")
    ]  # fmt: skip
    if leaver:
        events = [event for event in events if getattr(event, "client", "") != leaver]
        events[2:2] = leave(leaver)
    start = agreeing("abcd", quorum=3, min_accepted=3)
    whole = _play(start, events)
    assert whole.phase is Phase.STEPPING
    for count in range(len(events) + 1):
        assert _play(start, events, restart_after=count).accepted == whole.accepted


def _play(state: RoundState, events: list[ev.Event], restart_after: int = -1) -> RoundState:
    """Play events that apply; restart after so many of them."""
    stages: dict[str, tuple[str, ...]] = {}
    fresh = next_round(replace(state, round=-1))
    for number, event in enumerate([*events, None]):
        if number == restart_after:
            before = state
            present = frozenset("abcd") - state.out
            state = restored_round(replace(fresh, eligible=tuple("abcd"), settled=True), saved_of(state, dict(stages)))
            state, effects = advance(without_absent(state, present), ev.RoundRestored())
            assert state.phase is before.phase
            stages |= {effect.stage: effect.members for effect in effects if isinstance(effect, fx.OpenStage)}
        if event is not None and applies(event, state):
            state, effects = advance(state, event)
            stages |= {effect.stage: effect.members for effect in effects if isinstance(effect, fx.OpenStage)}
    return state


def test_the_number_of_draws_survives_a_restart_between_two_draws() -> None:
    """An abandoned round is never drawn again under a number that clients have answered."""
    _, effects = play(agreeing(), *leave("ab"), *answer("c"))
    restart = next(effect for effect in effects if isinstance(effect, fx.RestartRound))
    fresh = replace(next_round(replace(agreeing(), round=-1)), eligible=tuple("abc"), settled=True)
    past = (0, restart.past_draws - 1, ())
    state, opened = advance(restored_round(fresh, SavedRound([past])), ev.RoundRestored())
    assert (state.attempt, state.first_attempt) == (1, 1)
    assert opened == (fx.OpenAttempt(0, 0, 1, tuple("abc")),)
    drawn = restored_round(fresh, SavedRound([past, (0, 1, tuple("abc"))]))
    assert (drawn.attempt, drawn.first_attempt, drawn.phase) == (1, 1, Phase.AGREEING)
    assert drawn.drawn == frozenset("abc")


def test_torn_bytes_after_the_list_of_survivors_end_the_round() -> None:
    """The masked update of a survivor is gone after a power cut: its mask may be open, so nobody sends it again."""
    stages = {"sharing": tuple("abc"), "collecting": tuple("abc"), "signing": tuple("abc")}
    fresh = replace(next_round(replace(agreeing(), round=-1)), eligible=tuple("abc"), settled=True)
    graph = full_graph("abc").graph
    saved = SavedRound([(0, 0, tuple("abc"))], accepted("ab"), stages=stages, graph=graph)
    state, effects = advance(restored_round(fresh, saved), ev.RoundRestored())
    assert (state.phase, state.attempt) == (Phase.AGREEING, 1)
    assert "torn or gone" in next(effect for effect in effects if isinstance(effect, fx.RestartRound)).why


def test_every_pattern_of_drop_outs_of_five() -> None:
    """Five clients, each leaves in one stage or in none, of which four must stay: one counts if its update was here.

    With more drop-outs the round is drawn again.
    """
    for pattern in product([None, *ORDER], repeat=5):
        leaves = dict(zip("abcde", pattern, strict=True))
        state = _play_pattern(leaves)
        if sum(phase is not None for phase in pattern) <= 1:
            counted = [client for client in "abcde" if leaves[client] in {None, Phase.SIGNING, Phase.OPENING}]
            assert (state.phase, state.accepted) == (Phase.STEPPING, accepted("".join(counted))), leaves
        else:
            assert (state.attempt, state.phase) == (1, Phase.AGREEING), leaves


def _play_pattern(leaves: dict[str, Phase | None]) -> RoundState:
    """The state when the round has its step, or was drawn again."""
    state, gone = agreeing("abcde", quorum=4, min_accepted=4), set[str]()
    for stage in ORDER:
        for client in [client for client, phase in leaves.items() if phase is stage]:
            gone.add(client)
            if applies(ev.ClientDroppedOut(client), state):
                state = advance(state, ev.ClientDroppedOut(client))[0]
        for client in sorted(set("abcde") - gone):
            event = arrive(client)[0] if stage is Phase.COLLECTING else ev.StageAnswered(client)
            if state.phase is stage and not state.attempt and applies(event, state):
                state = advance(state, event)[0]
        if state.phase is Phase.SHARING and state.graph is None:
            state = advance(state, full_graph("abcde", 4, 4))[0]
    return state


def test_stages_are_of_secure_rounds_alone() -> None:
    """No state of a plain run is in a stage."""
    assert not agreeing(secure=False).staged
    assert agreeing().phase in STAGES
