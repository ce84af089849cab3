"""The round state machine: every (phase, event) pair, how a round closes, and what operators may do in each phase."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from fl_server.events import (
    Announce,
    AwaitClients,
    Cancel,
    ClientBack,
    ClientOut,
    Command,
    Commit,
    Committed,
    DeadlinePassed,
    End,
    EndRequested,
    Evaluated,
    Event,
    ExchangeReduced,
    Extended,
    OpenAttempt,
    PauseRequested,
    PickedUp,
    ReduceExchange,
    RestartRound,
    ResumeRequested,
    RetryDue,
    RetryLater,
    RosterChanged,
    StatesLost,
    Step,
    Stepped,
    UpdateAdmitted,
)
from fl_server.round_rule import UnexpectedEvent
from fl_server.round_state import Phase, RoundPolicy, RoundState
from fl_server.rounds import RULES, advance

ALL = tuple("abcdefgh")
STOP = EndRequested("stopped", "an operator said so")
COMMIT = (Stepped(), Committed())


def play(state: RoundState, *events: Event) -> tuple[RoundState, list[Command]]:
    """Apply events one after the other; the last state and all commands."""
    commands: list[Command] = []
    for event in events:
        state, more = advance(state, event)
        commands += more
    return state, commands


def collecting(clients: str = "abc", rounds: int = 3, **policy: Any) -> RoundState:
    """A run that has drawn all of `clients` in round 0, unless the policy says otherwise."""
    start = RoundState(RoundPolicy(seed=7, **{"clients_per_round": len(clients), **policy}), rounds)
    return advance(start, RosterChanged(tuple(clients), settled=True))[0]


def arrive(clients: str) -> list[Event]:
    """Updates of these clients, in this order."""
    return [UpdateAdmitted(client, client.encode()) for client in clients]


def leave(clients: str) -> list[Event]:
    """These clients will not deliver."""
    return [ClientOut(client) for client in clients]


def accepted(clients: str) -> tuple[tuple[str, bytes], ...]:
    """The accepted list that these clients make, in the order given."""
    return tuple((client, client.encode()) for client in clients)


# Every pair.

_HALF = play(collecting(rounds=1, quorum=2), *arrive("a"), *leave("c"))[0]
_STEPPING = play(_HALF, *arrive("b"))[0]
SAMPLES = {
    Phase.SELECTING: play(_HALF, *leave("b"))[0],
    Phase.COLLECTING: _HALF,
    Phase.REDUCING: play(collecting(exchanges=2), *arrive("abc"))[0],
    Phase.STEPPING: _STEPPING,
    Phase.COMMITTING: play(_STEPPING, Stepped())[0],
    Phase.EVALUATING: play(_STEPPING, *COMMIT)[0],
    Phase.ENDED: play(_STEPPING, *COMMIT, Evaluated())[0],
}
"""Of the cohort a, b, c of a run of one round, a has delivered, c is out and b still works."""
EVENTS: tuple[Event, ...] = (
    RosterChanged(("a", "b", "c", "d"), settled=True), UpdateAdmitted("b", b"b"), ClientOut("b"), ClientBack("c"),
    DeadlinePassed(), PickedUp(), RetryDue(), ExchangeReduced(), Stepped(), Committed(), Evaluated(),
    StatesLost("a: its disk is new"), PauseRequested(), ResumeRequested(), Extended(9), STOP,
)  # fmt: skip
NEXT = (
    {
        (Phase.SELECTING, RosterChanged): Phase.COLLECTING,
        (Phase.SELECTING, ClientBack): Phase.COLLECTING,
        (Phase.SELECTING, RetryDue): Phase.COLLECTING,
        (Phase.SELECTING, UpdateAdmitted): Phase.STEPPING,
        (Phase.SELECTING, EndRequested): Phase.ENDED,
        (Phase.SELECTING, StatesLost): Phase.COLLECTING,
        (Phase.COLLECTING, UpdateAdmitted): Phase.STEPPING,
        (Phase.COLLECTING, ClientOut): Phase.SELECTING,
        (Phase.COLLECTING, ClientBack): Phase.COLLECTING,
        (Phase.COLLECTING, DeadlinePassed): Phase.COLLECTING,
        (Phase.COLLECTING, PickedUp): Phase.COLLECTING,
        (Phase.COLLECTING, EndRequested): Phase.ENDED,
        (Phase.REDUCING, ExchangeReduced): Phase.COLLECTING,
        (Phase.REDUCING, EndRequested): Phase.ENDED,
        (Phase.STEPPING, Stepped): Phase.COMMITTING,
        (Phase.STEPPING, EndRequested): Phase.STEPPING,
        (Phase.COMMITTING, Committed): Phase.EVALUATING,
        (Phase.COMMITTING, EndRequested): Phase.COMMITTING,
        (Phase.EVALUATING, Evaluated): Phase.ENDED,
        (Phase.EVALUATING, EndRequested): Phase.ENDED,
        (Phase.ENDED, Extended): Phase.COLLECTING,
        (Phase.ENDED, RosterChanged): Phase.ENDED,
    }
    | {
        (phase, event): phase
        for phase in Phase
        for event in (RosterChanged, StatesLost, PauseRequested, ResumeRequested, Extended)
        if phase is not Phase.ENDED
        and (phase, event) not in {(Phase.SELECTING, RosterChanged), (Phase.SELECTING, StatesLost)}
    }
    | {(Phase.ENDED, StatesLost): Phase.ENDED}
)
"""Where each event leads from each sample; every pair that is not here is refused."""
PAIRS = [pytest.param(phase, event, id=f"{phase.value}-{type(event).__name__}") for phase in Phase for event in EVENTS]


def test_the_samples_are_complete() -> None:
    """There is a sample in each phase, and one of each event."""
    assert {phase: state.phase for phase, state in SAMPLES.items()} == {phase: phase for phase in Phase}
    assert {type(event) for event in EVENTS} == set(get_args(Event))


@pytest.mark.parametrize(("phase", "event"), PAIRS)
def test_every_pair_of_phase_and_event(phase: Phase, event: Event) -> None:
    """A legal event leads to the phase it should; any other raises, names itself and the phase, and changes nothing."""
    before, same = SAMPLES[phase], replace(SAMPLES[phase])
    if (phase, type(event)) in NEXT:
        assert advance(before, event)[0].phase is NEXT[phase, type(event)]
    else:
        with pytest.raises(UnexpectedEvent, match=f"{type(event).__name__} in phase {phase.value}"):
            advance(before, event)
    assert before == same


def test_the_table_has_no_other_pair() -> None:
    """RULES holds the legal pairs and nothing else."""
    assert set(RULES) == set(NEXT)


@pytest.mark.parametrize(
    ("phase", "event", "why"),
    [
        (Phase.COLLECTING, UpdateAdmitted("x", b"x"), "x is not of this round's cohort"),
        (Phase.COLLECTING, UpdateAdmitted("a", b"2"), "a was admitted before"),
        (Phase.COLLECTING, ClientOut("a"), "a is not outstanding"),
        (Phase.COLLECTING, ClientOut("c"), "c is not outstanding"),
        (Phase.COLLECTING, ClientBack("b"), "b is not out"),
        (Phase.SELECTING, ClientBack("a"), "a is not out"),
        (Phase.EVALUATING, Extended(1), "expected more than the 1 rounds"),
        (Phase.ENDED, Extended(1), "expected more than the 1 rounds"),
    ],
)
def test_an_event_that_does_not_fit_the_state_is_refused(phase: Phase, event: Event, why: str) -> None:
    """An event of a legal kind with wrong contents says what is wrong with it."""
    with pytest.raises(UnexpectedEvent, match=why):
        advance(SAMPLES[phase], event)


# Drawing.


def test_nothing_is_drawn_before_the_roster_is_settled() -> None:
    """Clients may be there; the first draw waits until the roster is complete."""
    start = RoundState(RoundPolicy(seed=7), rounds=1)
    state, commands = play(start, RosterChanged(ALL, settled=False), ResumeRequested())
    assert (state.phase, commands) == (Phase.SELECTING, [])
    assert advance(state, RosterChanged(ALL, settled=True))[0].phase is Phase.COLLECTING


def test_no_replacement_is_drawn_before_the_roster_is_settled() -> None:
    """A round that a restart went on with draws nobody from half a roster, and does so once the roster is complete."""
    restored = replace(collecting(quorum=3), settled=False, eligible=("a", "d"))
    state, commands = play(restored, *arrive("ab"), *leave("c"))
    assert (state.phase, commands) == (Phase.SELECTING, [AwaitClients(1, 0), RetryLater()])
    assert advance(state, RosterChanged(ALL, settled=False))[1] == ()
    opened = advance(state, RosterChanged(("a", "b", "e"), settled=True))[1]
    assert opened == (OpenAttempt(round=0, exchange=0, attempt=1, cohort=("e",)),)


def test_a_first_draw_waits_for_min_clients() -> None:
    """Below min_clients the run says how many are missing; with enough it draws."""
    state = collecting("ab", min_clients=3, clients_per_round=2)
    assert advance(state, ResumeRequested()) == (state, (AwaitClients(needed=3, present=2),))
    assert len(advance(state, RosterChanged(("a", "b", "c"), settled=True))[0].drawn) == 2


def test_a_small_roster_makes_a_small_goal() -> None:
    """With fewer clients than a cohort wants, all are drawn, and the quorum is all of them at most."""
    state = collecting("ab", clients_per_round=5, quorum=4)
    assert (state.goal, state.quorum, state.drawn) == (2, 2, frozenset("ab"))


def test_bernoulli_draws_a_goal_of_its_own_size() -> None:
    """The goal of a Bernoulli round is the size of its cohort, also where that is over-selected by name."""
    state = collecting("abcdefgh", sampling="bernoulli", rate=0.5, close="goal")
    assert 0 < state.goal == len(state.drawn) < 8


@pytest.mark.parametrize(("wanted", "factor", "drawn"), [(10, 1.3, 13), (50, 1.1, 55), (4, 1.3, 6), (3, 1.0, 3)])
def test_over_selection_rounds_up_once(wanted: int, factor: float, drawn: int) -> None:
    """ceil(wanted * factor) clients are drawn: 4 * 1.3 = 5.2 -> 6, and 50 * 1.1 is 55 although floats make it more."""
    many = "".join(map(chr, range(256, 320)))
    state = collecting(many, clients_per_round=wanted, close="goal", over_selection=factor)
    assert (state.goal, len(state.drawn)) == (wanted, drawn)


# Closing.


def test_a_round_closes_at_its_goal() -> None:
    """The last update wanted closes the round; the accepted list is in the order of id bytes, not of arrival."""
    state, commands = play(collecting(), *arrive("cab"))
    assert (state.phase, commands) == (Phase.STEPPING, [Step(accepted("abc"))])


def test_id_bytes_order_the_accepted_list() -> None:
    """Bytes decide: upper case before lower case, and é after z."""
    assert play(collecting("éaZz"), *arrive("azéZ"))[0].accepted == tuple((c, c.encode()) for c in "Zazé")


def test_a_round_closes_when_nobody_is_left_and_the_quorum_holds() -> None:
    """Once the last one at work is out, the round does not wait for its deadline."""
    state, commands = play(collecting(quorum=2), *leave("b"), *arrive("ca"))
    assert commands == [Step(accepted("ac"))]
    assert state.accepted == accepted("ac")


def test_a_round_waits_for_those_at_work_although_the_quorum_holds() -> None:
    """A quorum alone closes nothing."""
    assert play(collecting(quorum=1), *arrive("ab"))[1] == []


def test_a_deadline_with_the_quorum_closes() -> None:
    """The deadline takes what is there, and those who still work are told to stop: nobody works any more."""
    state, commands = play(collecting(quorum=2), *arrive("cb"), DeadlinePassed())
    assert commands == [Step(accepted("bc")), Cancel(("a",), 0)]
    assert state.outstanding == frozenset()


def test_a_deadline_below_the_quorum_keeps_and_replaces() -> None:
    """The next attempt keeps what was admitted, draws only what is missing, and the straggler's update still counts."""
    state = play(collecting(quorum=3), *arrive("a"), *leave("b"), RosterChanged(ALL, settled=True))[0]
    state, commands = play(state, DeadlinePassed())
    (opened,) = commands
    assert isinstance(opened, OpenAttempt)
    assert (opened.attempt, len(opened.cohort), state.admitted) == (1, 2, accepted("a"))
    assert set(opened.cohort) <= set("defgh")
    assert play(state, *arrive("c" + opened.cohort[0]))[0].phase is Phase.STEPPING


def test_a_deadline_without_replacements_goes_on_with_the_stragglers() -> None:
    """With nobody else to draw, the attempt is renewed for those who still work."""
    state, commands = play(collecting(quorum=3), *arrive("a"), DeadlinePassed())
    assert commands == [OpenAttempt(round=0, exchange=0, attempt=1, cohort=())]
    assert state.outstanding == {"b", "c"}


def test_a_hanging_client_does_not_keep_others_from_a_second_try() -> None:
    """a hangs and b failed: at the deadline b, who is there, is drawn again; else the round could never fill."""
    commands = play(collecting("ab", quorum=2), *leave("b"), DeadlinePassed())[1]
    assert commands == [OpenAttempt(round=0, exchange=0, attempt=1, cohort=("b",))]


def test_replacements_are_over_selected_too() -> None:
    """With close = "goal" two missing updates draw ceil(2 * 1.5) = 3 replacements."""
    state = collecting("ab", clients_per_round=2, quorum=2, close="goal", over_selection=1.5)
    opened = play(state, *leave("a"), RosterChanged(ALL, settled=True), DeadlinePassed())[1][-1]
    assert isinstance(opened, OpenAttempt)
    assert len(opened.cohort) == 3


def test_over_selection_takes_the_first_and_cancels_the_rest() -> None:
    """Of eight drawn for four the first four count, in the order of id bytes; the others are told to stop."""
    state = collecting("abcdefgh", clients_per_round=4, close="goal", over_selection=2.0)
    assert state.drawn == set(ALL)
    assert play(state, *arrive("hbge"))[1] == [Step(accepted("begh")), Cancel(("a", "c", "d", "f"), 0)]


OVER = {"clients_per_round": 4, "quorum": 2, "close": "goal", "over_selection": 1.5}
"""Six of eight are drawn for four."""


@pytest.mark.parametrize(
    ("out", "came", "timed_out", "factor"),
    [(0, 4, False, 1.42), (2, 4, False, 1.5), (1, 4, False, 1.45), (0, 3, True, 1.6), (3, 2, True, 1.6)],
    ids=["nobody dropped out", "two did", "one did, one was slow", "three were late", "most dropped out"],
)
def test_over_selection_follows_the_drop_out(out: int, came: int, timed_out: bool, factor: float) -> None:
    """Worked by hand, 1.5 + 0.2 (r - 1.5): r = 1.1, the least; 6 / 4; 5 / 4; 6 / 3 = 2; and 2, the most, for 6 / 2."""
    state = collecting("abcdefgh", **OVER)
    drawn = "".join(sorted(state.drawn))
    state = play(state, *leave(drawn[:out]), *arrive(drawn[out : out + came]))[0]
    state = play(state, DeadlinePassed())[0] if timed_out else state
    assert state.phase is Phase.STEPPING
    assert state.over_selection == pytest.approx(factor)
    assert play(state, *COMMIT)[0].over_selection == state.over_selection


def test_what_was_learned_decides_how_many_are_drawn() -> None:
    """Factor 1.42 after a round without drop-outs: ceil(4 * 1.42) = 6; after ten of them ceil(4 * 1.143) = 5."""
    state, sizes = collecting("abcdefgh", rounds=11, evaluate_every=0, **OVER), []
    while state.phase is not Phase.ENDED:
        sizes.append(len(state.drawn))
        state = play(state, *arrive("".join(sorted(state.drawn)[:4])), *COMMIT)[0]
    assert (sizes[:2], sizes[-1]) == ([6, 6], 5)


def test_another_attempt_makes_drop_outs_of_those_still_at_work() -> None:
    """Four of six came, in two attempts: a was drawn in the first, hung beyond its deadline, and dropped out."""
    state = collecting("abcdefgh", **{**OVER, "quorum": 4, "over_selection": 1.0})
    first = "".join(sorted(state.drawn))
    state = play(state, *arrive(first[1:]), DeadlinePassed())[0]
    new = "".join(sorted(state.drawn - set(first)))
    state = play(state, *arrive(new))[0]
    assert (len(new), state.phase) == (1, Phase.STEPPING)
    assert state.over_selection == pytest.approx(1.0 + 0.2 * (5 / 4 - 1.0))


def test_nothing_is_learned_where_nobody_is_over_selected() -> None:
    """close = "cohort" draws whom it wants, and the exchanges behind the first ask those who were accepted."""
    assert play(collecting(), *leave("a"), *arrive("bc"))[0].over_selection == 0
    state = collecting("abcdefgh", exchanges=2, **OVER)
    state = play(state, *arrive("".join(sorted(state.drawn)[:4])))[0]
    state = play(state, ExchangeReduced())[0]
    learned = state.over_selection
    state = play(state, *leave(min(state.drawn)), *arrive("".join(sorted(state.drawn)[1:])))[0]
    assert (state.phase, state.over_selection) == (Phase.STEPPING, learned)


def as_fixed(came: str, out: str = "") -> RoundState:
    """After a restart: the list of a, b and c was fixed, and the bytes of those who came are there."""
    state = replace(collecting(quorum=1), fixed=accepted("abc"), out=frozenset(out))
    return replace(state, admitted=accepted(came))


def test_a_fixed_list_closes_when_it_is_whole() -> None:
    """Not before, although the quorum holds; and a restart later it is a list like another."""
    state, commands = play(as_fixed("b"), PickedUp(), *arrive("a"))
    assert (state.phase, commands) == (Phase.COLLECTING, [])
    state, commands = play(state, *arrive("c"))
    assert (commands, state.fixed) == ([Step(accepted("abc"))], ())


@pytest.mark.parametrize(
    ("state", "event", "missing"),
    [
        (as_fixed("ab"), DeadlinePassed(), 1),
        (as_fixed("ab"), ClientOut("c"), 1),
        (as_fixed("a", out="bc"), PickedUp(), 2),
        (as_fixed("ab"), UpdateAdmitted("c", b"other bytes"), 1),
    ],
    ids=["deadline", "lost", "nobody left", "another update"],
)
def test_a_fixed_list_that_cannot_be_made_whole_draws_the_round_anew(
    state: RoundState, event: Event, missing: int
) -> None:
    """Never a shorter or another list under its name: all of the round is forgotten, and it is drawn again."""
    after, commands = play(state, event)
    lost = f"the bytes of {missing} of its 3 accepted updates are lost, and did not come again"
    assert commands[0] == RestartRound(0, lost, states=False)
    assert commands[-1] == OpenAttempt(round=0, exchange=0, attempt=1, cohort=("a", "b", "c"))
    assert (after.admitted, after.fixed, after.first_attempt) == ((), (), 1)


def test_an_update_of_a_client_that_was_given_up_counts() -> None:
    """A client that was out and delivers after all is admitted, and is out no more."""
    state = play(collecting(), *leave("a"), *arrive("a"))[0]
    assert (state.admitted, state.out) == (accepted("a"), frozenset())


def test_when_everyone_failed_the_round_waits_and_tries_again() -> None:
    """All out: wait. After the wait those who are there are drawn again, in a new attempt."""
    state, commands = play(collecting(), *leave("abc"))
    assert (state.phase, commands) == (Phase.SELECTING, [AwaitClients(3, 0), RetryLater()])
    opened = advance(state, RetryDue())[1]
    assert opened == (OpenAttempt(round=0, exchange=0, attempt=2, cohort=("a", "b", "c")),)


def test_a_retry_that_finds_nobody_waits_again() -> None:
    """As long as nobody is there, each retry asks for the next one."""
    state = play(collecting(), *leave("abc"), RosterChanged((), settled=True))[0]
    assert advance(state, RetryDue())[1] == (AwaitClients(3, 0), RetryLater())


def test_a_lost_client_stays_welcome_after_a_retry() -> None:
    """b is away when a retry draws a anew; back within the round, what b computed still counts."""
    state = play(collecting("ab", quorum=2), *leave("ab"), RosterChanged(("a",), settled=True), RetryDue())[0]
    assert play(state, ClientBack("b"), *arrive("ba"))[0].accepted == accepted("ab")


def test_a_client_that_comes_back_ends_the_wait() -> None:
    """Nobody was left to draw; one of the cohort returns, and the attempt goes on with it."""
    state, commands = play(play(collecting(), *leave("abc"))[0], ClientBack("b"))
    assert (state.outstanding, commands) == (frozenset("b"), [OpenAttempt(round=0, exchange=0, attempt=1, cohort=())])


def test_a_retry_needs_a_round_that_was_drawn() -> None:
    """A retry timer that outlives its round is refused: it would change which cohort the next round draws."""
    with pytest.raises(UnexpectedEvent, match="has not been drawn"):
        advance(RoundState(RoundPolicy(seed=7), rounds=1), RetryDue())


def test_a_round_that_is_picked_up_complete_is_closed() -> None:
    """After a restart the ledger may hold all that was wanted: no event but the restart itself would close it."""
    assert advance(replace(collecting(), admitted=accepted("cab")), PickedUp())[1] == (Step(accepted("abc")),)


# Exchanges.


def test_the_next_exchange_goes_to_those_who_were_accepted() -> None:
    """Of a, b, c only a and c delivered: exchange 1 goes to a and c, wants both, and is followed by the step."""
    state, commands = play(collecting(exchanges=2), *arrive("ca"), *leave("b"), ExchangeReduced())
    assert commands == [ReduceExchange(accepted("ac")), OpenAttempt(0, 1, 0, ("a", "c"))]
    assert (state.goal, state.outstanding, state.admitted) == (2, frozenset("ac"), ())
    assert play(state, *arrive("ac"))[1] == [Step(accepted("ac"))]


def test_a_later_exchange_below_quorum_restarts_the_round() -> None:
    """Nobody can replace a client of exchange 1: stragglers stop, and the round is drawn anew as another attempt."""
    state = play(collecting(exchanges=2, quorum=3), *arrive("abc"), ExchangeReduced(), *arrive("a"))[0]
    state, commands = play(state, DeadlinePassed())
    assert commands == [
        RestartRound(0, "exchange 1 had 1 of the 3 updates that it needs", states=False), Cancel(("b", "c"), 1),
        OpenAttempt(round=0, exchange=0, attempt=1, cohort=("a", "b", "c")),
    ]  # fmt: skip
    assert (state.exchange, state.admitted, state.accepted) == (0, (), ())


def test_a_restart_without_anybody_at_work_cancels_nobody() -> None:
    """When the last client of exchange 1 fails there is nobody to tell."""
    state = play(collecting("a", exchanges=2), *arrive("a"), ExchangeReduced())[0]
    why = "exchange 1 had 0 of the 1 updates that it needs"
    opened = OpenAttempt(round=0, exchange=0, attempt=1, cohort=("a",))
    assert play(state, *leave("a"))[1] == [RestartRound(0, why, states=False), opened]


def test_a_round_that_restarts_while_paused_waits() -> None:
    """A restart gives the round up, so a pause holds from there."""
    state = play(collecting("a", exchanges=2), *arrive("a"), ExchangeReduced(), PauseRequested(), *leave("a"))[0]
    assert (state.phase, state.attempt) == (Phase.SELECTING, 1)
    assert advance(state, ResumeRequested())[1] == (OpenAttempt(0, 0, 1, ("a",)),)


# Step, commit, evaluation.


def test_a_round_is_durable_before_anybody_hears_of_it() -> None:
    """Step, then commit, then the announcement, then the next draw."""
    state, commands = play(collecting("a"), *arrive("a"), *COMMIT)
    assert commands == [
        Step(accepted("a")), Commit(), Announce(0, evaluate=True), OpenAttempt(1, 0, 0, ("a",)),
    ]  # fmt: skip
    assert (state.round, state.accepted, state.admitted) == (1, (), ())


@pytest.mark.parametrize(("every", "due"), [(0, ""), (1, "0123"), (2, "13"), (3, "23"), (9, "3")])
def test_which_rounds_are_evaluated(every: int, due: str) -> None:
    """Of rounds 0 to 3 every so many are evaluated, and the last one always, unless evaluation is off."""
    state, evaluated = collecting("a", rounds=4, evaluate_every=every), ""
    while state.phase is Phase.COLLECTING:
        state, commands = play(state, *arrive("a"), *COMMIT)
        evaluated += "".join(str(c.round) for c in commands if isinstance(c, Announce) and c.evaluate)
    assert evaluated == due


def test_the_last_round_is_evaluated_before_the_end() -> None:
    """The run does not end with an evaluation under way."""
    state, commands = play(collecting("a", rounds=1), *arrive("a"), *COMMIT)
    assert (state.phase, commands[-1]) == (Phase.EVALUATING, Announce(0, evaluate=True))
    assert advance(state, Evaluated())[1] == (End("completed", "1 rounds are done"),)


def test_a_run_without_evaluation_ends_at_its_last_commit() -> None:
    """With evaluation off there is nothing to wait for."""
    assert play(collecting("a", rounds=1, evaluate_every=0), *arrive("a"), *COMMIT)[0].phase is Phase.ENDED


def test_the_next_round_can_wait_for_the_evaluation() -> None:
    """With await_evaluation the draw comes after the evaluation, not beside it."""
    state, _ = play(collecting("a", await_evaluation=True), *arrive("a"), *COMMIT)
    assert state.phase is Phase.EVALUATING
    assert advance(state, Evaluated())[1] == (OpenAttempt(1, 0, 0, ("a",)),)


@pytest.mark.parametrize(("every", "due"), [(0, ""), (1, "0123"), (3, "23"), (9, "3")])
def test_which_rounds_clients_are_asked_about(every: int, due: str) -> None:
    """Of rounds 0 to 3 every so many and the last, whatever the server evaluates; no draw waits for them."""
    state, asked = collecting("a", rounds=4, ask_clients_every=every, evaluate_every=0), ""
    while state.phase is Phase.COLLECTING:
        state, commands = play(state, *arrive("a"), *COMMIT)
        asked += "".join(str(c.round) for c in commands if isinstance(c, Announce) and c.ask_clients)
    assert asked == due
    assert state.phase is (Phase.EVALUATING if every else Phase.ENDED)


def test_the_next_round_can_wait_for_the_clients() -> None:
    """With await_clients the server's word does not start the draw, theirs does."""
    state, _ = play(collecting("a", ask_clients_every=1, await_clients=True), *arrive("a"), *COMMIT)
    assert (state.phase, state.awaited) == (Phase.EVALUATING, {"clients"})
    state, commands = advance(state, Evaluated("server"))
    assert (state.phase, commands) == (Phase.EVALUATING, ())
    assert advance(state, Evaluated("clients"))[1] == (OpenAttempt(1, 0, 0, ("a",)),)


def test_the_last_round_waits_for_both() -> None:
    """Server and clients, in either order, then the end."""
    state, _ = play(collecting("a", rounds=1, ask_clients_every=5), *arrive("a"), *COMMIT)
    for first, second in (("server", "clients"), ("clients", "server")):
        half, commands = advance(state, Evaluated(first))
        assert (half.phase, commands) == (Phase.EVALUATING, ())
        assert advance(half, Evaluated(second))[1] == (End("completed", "1 rounds are done"),)


def test_a_restart_after_the_last_commit_draws_no_further_round() -> None:
    """A run that is restored with all its rounds done ends as soon as it is told of the roster."""
    restored = RoundState(RoundPolicy(seed=7), rounds=3, round=3)
    assert play(restored, RosterChanged(ALL, settled=True))[1] == [End("completed", "3 rounds are done")]


# Operators.


def test_a_pause_lets_the_round_finish_and_holds_the_next() -> None:
    """A paused run fills, replaces and commits its open round, and draws the next one when resumed."""
    paused = play(collecting("ab", quorum=2), PauseRequested(), *leave("a"), RosterChanged(("b", "c"), settled=True))[0]
    state, commands = play(paused, *arrive("b"))
    assert commands == [OpenAttempt(0, 0, 1, ("c",))]
    state, commands = play(state, *arrive("c"), *COMMIT, RosterChanged(ALL, settled=True))
    assert (state.phase, state.round, type(commands[-1])) == (Phase.SELECTING, 1, Announce)
    assert advance(state, ResumeRequested())[0].phase is Phase.COLLECTING


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED], ids=lambda phase: phase.value)
def test_pause_and_resume_leave_no_trace(phase: Phase) -> None:
    """In every phase a pause changes nothing but the word, and a resume takes it back."""
    state = SAMPLES[phase]
    paused, commands = advance(state, PauseRequested())
    assert (paused, commands) == (replace(state, paused=True), ())
    assert advance(paused, ResumeRequested())[0] == state


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED], ids=lambda phase: phase.value)
def test_an_extension_sets_the_number_of_rounds(phase: Phase) -> None:
    """In every open phase the run gets as many rounds as were asked for, and does nothing else."""
    assert advance(SAMPLES[phase], Extended(9)) == (replace(SAMPLES[phase], rounds=9), ())


def test_a_run_that_is_extended_in_its_last_evaluation_goes_on() -> None:
    """The extension came in time: the evaluation leads to the next round."""
    assert play(SAMPLES[Phase.EVALUATING], Extended(2), Evaluated())[0].phase is Phase.COLLECTING


def test_an_extended_run_draws_what_a_longer_run_draws() -> None:
    """A run of one round that is extended to two opens the round that a run of two rounds opens."""
    events = (*arrive("a"), *COMMIT)
    extended = play(collecting("a", rounds=1), *events, Evaluated(), Extended(2))[1][-1]
    assert extended == play(collecting("a", rounds=2), *events)[1][-1]


def test_a_run_that_ended_in_mid_round_reopens_it_anew() -> None:
    """Its clients were told to stop, so the round is drawn again, as an attempt that the ledger does not know yet."""
    ended, commands = play(collecting("ab", rounds=9), *arrive("a"), EndRequested("completed", "time is up"))
    assert commands == [Cancel(("b",), 0), End("completed", "time is up")]
    assert ended.outstanding == frozenset()
    state, commands = play(ended, Extended(9))
    assert (state.admitted, commands) == ((), [OpenAttempt(round=0, exchange=0, attempt=1, cohort=("a", "b"))])


@pytest.mark.parametrize("status", ["stopped", "failed"])
def test_only_a_completed_run_can_be_extended(status: Any) -> None:
    """A run that was stopped or failed stays so."""
    ended = play(collecting(), EndRequested(status, "why"))[0]
    with pytest.raises(UnexpectedEvent, match="only a completed run"):
        advance(ended, Extended(9))


@pytest.mark.parametrize("phase", [Phase.STEPPING, Phase.COMMITTING], ids=lambda phase: phase.value)
def test_a_stop_waits_for_the_commit_under_way(phase: Phase) -> None:
    """What was collected is not thrown away: the round is committed and evaluated, then the run ends as it was told."""
    state = replace(SAMPLES[phase], rounds=9)
    state, commands = play(state, STOP, *COMMIT[phase is Phase.COMMITTING :], Evaluated())
    assert (state.round, commands[-1]) == (1, End("stopped", "an operator said so"))


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED], ids=lambda phase: phase.value)
def test_an_error_ends_the_run_at_once(phase: Phase) -> None:
    """A run that failed does not go on in any phase, and only those who still work are told to stop."""
    state, commands = advance(SAMPLES[phase], EndRequested("failed", "disk full"))
    told = (Cancel(("b",), 0),) if phase is Phase.COLLECTING else ()
    assert (state.phase, commands) == (Phase.ENDED, (*told, End("failed", "disk full")))
