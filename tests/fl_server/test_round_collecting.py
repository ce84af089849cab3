"""How a round closes: goal, quorum, deadline, replacements, and what it learns for the next draw; exchanges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fl_server.events import (
    AwaitClients,
    Cancel,
    ClientBack,
    ClientOut,
    DeadlinePassed,
    Event,
    ExchangeReduced,
    OpenAttempt,
    PauseRequested,
    PickedUp,
    QuorumMissed,
    ReduceExchange,
    RestartRound,
    ResumeRequested,
    RetryDue,
    RetryLater,
    RosterChanged,
    Step,
    UpdateAdmitted,
)
from fl_server.round_rule import UnexpectedEvent
from fl_server.round_state import Phase, RoundPolicy, RoundState
from fl_server.rounds import advance
from tests.fl_server.round_play import ALL, COMMIT, accepted, arrive, collecting, leave, play


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
    missed, opened = commands
    assert missed == QuorumMissed(round=0, exchange=0, attempt=0, admitted=1, quorum=3)
    assert isinstance(opened, OpenAttempt)
    assert (opened.attempt, len(opened.cohort), state.admitted) == (1, 2, accepted("a"))
    assert set(opened.cohort) <= set("defgh")
    assert play(state, *arrive("c" + opened.cohort[0]))[0].phase is Phase.STEPPING


def test_a_deadline_without_replacements_goes_on_with_the_stragglers() -> None:
    """With nobody else to draw, the attempt is renewed for those who still work."""
    state, commands = play(collecting(quorum=3), *arrive("a"), DeadlinePassed())
    assert commands[1:] == [OpenAttempt(round=0, exchange=0, attempt=1, cohort=())]
    assert state.outstanding == {"b", "c"}


def test_a_hanging_client_does_not_keep_others_from_a_second_try() -> None:
    """a hangs and b failed: at the deadline b, who is there, is drawn again; else the round could never fill."""
    commands = play(collecting("ab", quorum=2), *leave("b"), DeadlinePassed())[1]
    assert commands[1:] == [OpenAttempt(round=0, exchange=0, attempt=1, cohort=("b",))]


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


MISSED = QuorumMissed(round=0, exchange=0, attempt=0, admitted=0, quorum=1)


def test_an_attempt_that_was_never_opened_misses_no_quorum() -> None:
    """Nobody was left to draw, and an update comes that is not enough either: that is no second failure."""
    waiting = play(collecting(quorum=2), *leave("abc"))[0]
    commands = play(waiting, *arrive("a"))[1]
    assert commands == [AwaitClients(2, 0), RetryLater()]


def test_when_everyone_failed_the_round_waits_and_tries_again() -> None:
    """All out: wait. After the wait those who are there are drawn again, in a new attempt."""
    state, commands = play(collecting(), *leave("abc"))
    assert (state.phase, commands) == (Phase.SELECTING, [MISSED, AwaitClients(3, 0), RetryLater()])
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
        QuorumMissed(round=0, exchange=1, attempt=0, admitted=1, quorum=3),
        RestartRound(0, "exchange 1 had 1 of the 3 updates that it needs", states=False), Cancel(("b", "c"), 1),
        OpenAttempt(round=0, exchange=0, attempt=1, cohort=("a", "b", "c")),
    ]  # fmt: skip
    assert (state.exchange, state.admitted, state.accepted) == (0, (), ())


def test_a_restart_without_anybody_at_work_cancels_nobody() -> None:
    """When the last client of exchange 1 fails there is nobody to tell."""
    state = play(collecting("a", exchanges=2), *arrive("a"), ExchangeReduced())[0]
    why = "exchange 1 had 0 of the 1 updates that it needs"
    opened = OpenAttempt(round=0, exchange=0, attempt=1, cohort=("a",))
    assert play(state, *leave("a"))[1][1:] == [RestartRound(0, why, states=False), opened]


def test_a_round_that_restarts_while_paused_waits() -> None:
    """A restart gives the round up, so a pause holds from there."""
    state = play(collecting("a", exchanges=2), *arrive("a"), ExchangeReduced(), PauseRequested(), *leave("a"))[0]
    assert (state.phase, state.attempt) == (Phase.SELECTING, 1)
    assert advance(state, ResumeRequested())[1] == (OpenAttempt(0, 0, 1, ("a",)),)
