"""The close of a round: goal, quorum, deadline, replacements, the over-selection factor, and exchanges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fl_server.rounds.effects import (
    AwaitClients,
    Cancel,
    ComputeStep,
    DeadlineMissed,
    OpenAttempt,
    QuorumMissed,
    ReduceExchange,
    RestartRound,
    RetryLater,
)
from fl_server.rounds.events import (
    ClientDroppedOut,
    ClientReturned,
    DeadlinePassed,
    Event,
    ExchangeReduced,
    PauseRequested,
    ResumeRequested,
    RetryDue,
    RosterChanged,
    RoundRestored,
    UpdateAdmitted,
)
from fl_server.rounds.machine import advance
from fl_server.rounds.sampling import RoundPolicy
from fl_server.rounds.state import Phase, RoundState, UnexpectedEvent
from tests.fl_server.round_play import ALL, COMMIT, accepted, arrive, collecting, leave, play


def test_a_round_closes_at_its_goal() -> None:
    """The last required update closes the round; the accepted list is in the order of id bytes, not of arrival."""
    state, commands = play(collecting(), *arrive("cab"))
    assert (state.phase, commands) == (Phase.STEPPING, [ComputeStep(accepted("abc"))])


def test_id_bytes_order_the_accepted_list() -> None:
    """Upper case before lower case, and é after z."""
    assert play(collecting("éaZz"), *arrive("azéZ"))[0].accepted == tuple((c, c.encode()) for c in "Zazé")


def test_a_round_closes_when_no_client_works_and_the_quorum_holds() -> None:
    """Once the last working client is out, the round does not wait for its deadline."""
    state, commands = play(collecting(quorum=2), *leave("b"), *arrive("ca"))
    assert commands == [ComputeStep(accepted("ac"))]
    assert state.accepted == accepted("ac")


def test_a_round_with_quorum_waits_for_working_clients() -> None:
    """A quorum alone does not close a round."""
    assert play(collecting(quorum=1), *arrive("ab"))[1] == []


def test_a_deadline_with_the_quorum_closes() -> None:
    """The deadline closes the round with the admitted updates and cancels the clients that still work."""
    state, commands = play(collecting(quorum=2), *arrive("cb"), DeadlinePassed())
    assert commands == [ComputeStep(accepted("bc")), Cancel(("a",), 0), DeadlineMissed(("a",))]
    assert state.outstanding == frozenset()


def test_a_deadline_below_the_quorum_keeps_and_replaces() -> None:
    """The next attempt keeps admitted updates, draws only the missing ones, and the straggler's update still counts."""
    state = play(collecting(quorum=3), *arrive("a"), *leave("b"), RosterChanged(ALL, settled=True))[0]
    state, commands = play(state, DeadlinePassed())
    missed, opened, late = commands
    assert missed == QuorumMissed(round=0, exchange=0, attempt=0, admitted=1, quorum=3)
    assert isinstance(opened, OpenAttempt)
    assert (opened.attempt, len(opened.cohort), state.admitted) == (1, 2, accepted("a"))
    assert late == DeadlineMissed(("c",))
    assert set(opened.cohort) <= set("defgh")
    assert play(state, *arrive("c" + opened.cohort[0]))[0].phase is Phase.STEPPING


def test_a_deadline_without_replacements_continues_with_the_stragglers() -> None:
    """Without other clients to draw, the attempt is renewed for those that still work."""
    state, commands = play(collecting(quorum=3), *arrive("a"), DeadlinePassed())
    assert commands[1:] == [OpenAttempt(round=0, exchange=0, attempt=1, cohort=())]
    assert state.outstanding == {"b", "c"}


def test_a_hanging_client_does_not_block_a_second_draw_of_others() -> None:
    """a hangs and b failed: at the deadline b is drawn again, because otherwise the round could never fill."""
    commands = play(collecting("ab", quorum=2), *leave("b"), DeadlinePassed())[1]
    assert commands[1:] == [OpenAttempt(round=0, exchange=0, attempt=1, cohort=("b",))]


def test_replacements_are_over_selected_too() -> None:
    """With close = "goal" two missing updates draw ceil(2 * 1.5) = 3 replacements."""
    state = collecting("ab", clients_per_round=2, quorum=2, close="goal", over_selection=1.5)
    opened = play(state, *leave("a"), RosterChanged(ALL, settled=True), DeadlinePassed())[1][-1]
    assert isinstance(opened, OpenAttempt)
    assert len(opened.cohort) == 3


def test_over_selection_takes_the_first_and_cancels_the_rest() -> None:
    """Of eight drawn for four the first four count, in the order of id bytes; the others are cancelled."""
    state = collecting("abcdefgh", clients_per_round=4, close="goal", over_selection=2.0)
    assert state.drawn == set(ALL)
    assert play(state, *arrive("hbge"))[1] == [ComputeStep(accepted("begh")), Cancel(("a", "c", "d", "f"), 0)]


OVER: dict[str, Any] = {"clients_per_round": 4, "quorum": 2, "close": "goal", "over_selection": 1.5}
"""Six of eight are drawn for four."""


@pytest.mark.parametrize(
    ("out", "arrived", "timed_out", "factor"),
    [(0, 4, False, 1.42), (2, 4, False, 1.5), (1, 4, False, 1.45), (0, 3, True, 1.6), (3, 2, True, 1.6)],
    ids=["none dropped out", "two did", "one did, one was slow", "three were late", "most dropped out"],
)
def test_over_selection_follows_the_drop_out(out: int, arrived: int, timed_out: bool, factor: float) -> None:
    """By hand, 1.5 + 0.2 (r - 1.5): r = 1.1, the minimum; 6 / 4; 5 / 4; 6 / 3 = 2; and 2, the maximum, for 6 / 2."""
    state = collecting("abcdefgh", **OVER)
    drawn = "".join(sorted(state.drawn))
    state = play(state, *leave(drawn[:out]), *arrive(drawn[out : out + arrived]))[0]
    state = play(state, DeadlinePassed())[0] if timed_out else state
    assert state.phase is Phase.STEPPING
    assert state.over_selection == pytest.approx(factor)
    assert play(state, *COMMIT)[0].over_selection == state.over_selection


def test_the_updated_factor_decides_how_many_are_drawn() -> None:
    """Factor 1.42 after a round without drop-outs: ceil(4 * 1.42) = 6; after ten of them ceil(4 * 1.143) = 5."""
    state, sizes = collecting("abcdefgh", rounds=11, evaluate_every=0, **OVER), []
    while state.phase is not Phase.ENDED:
        sizes.append(len(state.drawn))
        state = play(state, *arrive("".join(sorted(state.drawn)[:4])), *COMMIT)[0]
    assert (sizes[:2], sizes[-1]) == ([6, 6], 5)


def test_another_attempt_counts_stragglers_as_drop_outs() -> None:
    """Four of six delivered in two attempts: a, drawn in the first, was over its deadline and counts as dropped out."""
    state = collecting("abcdefgh", **{**OVER, "quorum": 4, "over_selection": 1.0})
    first = "".join(sorted(state.drawn))
    state = play(state, *arrive(first[1:]), DeadlinePassed())[0]
    new = "".join(sorted(state.drawn - set(first)))
    state = play(state, *arrive(new))[0]
    assert (len(new), state.phase) == (1, Phase.STEPPING)
    assert state.over_selection == pytest.approx(1.0 + 0.2 * (5 / 4 - 1.0))


def test_without_over_selection_the_factor_is_not_updated() -> None:
    """close = "cohort" draws exactly the wanted number, and later exchanges ask the accepted clients."""
    assert play(collecting(), *leave("a"), *arrive("bc"))[0].over_selection == 0
    state = collecting("abcdefgh", exchanges=2, **OVER)
    state = play(state, *arrive("".join(sorted(state.drawn)[:4])))[0]
    state = play(state, ExchangeReduced())[0]
    before = state.over_selection
    state = play(state, *leave(min(state.drawn)), *arrive("".join(sorted(state.drawn)[1:])))[0]
    assert (state.phase, state.over_selection) == (Phase.STEPPING, before)


def with_fixed_list(arrived: str, out: str = "") -> RoundState:
    """After a restart: the list of a, b and c was fixed, and the updates of `arrived` are there."""
    state = replace(collecting(quorum=1), fixed=accepted("abc"), out=frozenset(out))
    return replace(state, admitted=accepted(arrived))


def test_a_fixed_list_closes_when_it_is_complete() -> None:
    """Not before, although the quorum holds; after another restart it is a normal list."""
    state, commands = play(with_fixed_list("b"), RoundRestored(), *arrive("a"))
    assert (state.phase, commands) == (Phase.COLLECTING, [])
    state, commands = play(state, *arrive("c"))
    assert (commands, state.fixed) == ([ComputeStep(accepted("abc"))], ())


@pytest.mark.parametrize(
    ("state", "event", "missing"),
    [
        (with_fixed_list("ab"), DeadlinePassed(), 1),
        (with_fixed_list("ab"), ClientDroppedOut("c"), 1),
        (with_fixed_list("a", out="bc"), RoundRestored(), 2),
        (with_fixed_list("ab"), UpdateAdmitted((("c", b"other bytes"),)), 1),
    ],
    ids=["deadline", "lost", "none left", "another update"],
)
def test_a_fixed_list_that_cannot_be_completed_redraws_the_round(state: RoundState, event: Event, missing: int) -> None:
    """The list is never shortened or changed: all of the round is dropped, and the round is redrawn."""
    after, commands = play(state, event)
    lost = f"the bytes of accepted updates are lost, {missing} of 3, and did not come again"
    assert commands[0] == RestartRound(0, lost, states=False)
    opened = [command for command in commands if not isinstance(command, DeadlineMissed)][-1]
    assert opened == OpenAttempt(round=0, exchange=0, attempt=1, cohort=("a", "b", "c"))
    assert (after.admitted, after.fixed, after.first_attempt) == ((), (), 1)


def test_a_late_update_of_a_dropped_client_counts() -> None:
    """A client that is out and still delivers is admitted, and is no longer out."""
    state = play(collecting(), *leave("a"), *arrive("a"))[0]
    assert (state.admitted, state.out) == (accepted("a"), frozenset())


MISSED = QuorumMissed(round=0, exchange=0, attempt=0, admitted=0, quorum=1)


def test_an_attempt_that_was_never_opened_misses_no_quorum() -> None:
    """No client was left to draw, and an update arrives that is still below the quorum: no second failure."""
    waiting = play(collecting(quorum=2), *leave("abc"))[0]
    commands = play(waiting, *arrive("a"))[1]
    assert commands == [AwaitClients(2, 0), RetryLater()]


def test_when_all_clients_failed_the_round_waits_and_retries() -> None:
    """With all clients out the round waits. After the wait the present clients are drawn again, in a new attempt."""
    state, commands = play(collecting(), *leave("abc"))
    assert (state.phase, commands) == (Phase.SELECTING, [MISSED, AwaitClients(3, 0), RetryLater()])
    opened = advance(state, RetryDue())[1]
    assert opened == (OpenAttempt(round=0, exchange=0, attempt=2, cohort=("a", "b", "c")),)


def test_a_retry_without_clients_waits_again() -> None:
    """Without present clients, each retry schedules the next one."""
    state = play(collecting(), *leave("abc"), RosterChanged((), settled=True))[0]
    assert advance(state, RetryDue())[1] == (AwaitClients(3, 0), RetryLater())


def test_a_lost_clients_update_counts_after_a_retry() -> None:
    """b is away when a retry draws a again; if b returns within the round, its update still counts."""
    state = play(collecting("ab", quorum=2), *leave("ab"), RosterChanged(("a",), settled=True), RetryDue())[0]
    back = RosterChanged(("a", "b"), settled=True)
    assert play(state, back, ClientReturned("b"), *arrive("ba"))[0].accepted == accepted("ab")


def test_a_client_that_returns_ends_the_wait() -> None:
    """No client was left to draw; one of the cohort returns, and the attempt continues with it."""
    state, commands = play(play(collecting(), *leave("abc"))[0], ClientReturned("b"))
    assert (state.outstanding, commands) == (frozenset("b"), [OpenAttempt(round=0, exchange=0, attempt=1, cohort=())])


def test_a_retry_needs_a_round_that_was_drawn() -> None:
    """A retry timer that outlives its round is refused: it would change which cohort the next round draws."""
    with pytest.raises(UnexpectedEvent, match="has not been drawn"):
        advance(RoundState(RoundPolicy(seed=7), rounds=1), RetryDue())


def test_a_round_that_is_restored_complete_is_closed() -> None:
    """After a restart the ledger may have all required updates: only the restart itself can close the round."""
    assert advance(replace(collecting(), admitted=accepted("cab")), RoundRestored())[1] == (
        ComputeStep(accepted("abc")),
    )


def test_the_next_exchange_goes_to_the_accepted_clients() -> None:
    """Of a, b, c only a and c delivered: exchange 1 goes to a and c, requires both, and is followed by the step."""
    state, commands = play(collecting(exchanges=2), *arrive("ca"), *leave("b"), ExchangeReduced())
    assert commands == [ReduceExchange(accepted("ac")), OpenAttempt(0, 1, 0, ("a", "c"))]
    assert (state.goal, state.outstanding, state.admitted) == (2, frozenset("ac"), ())
    assert play(state, *arrive("ac"))[1] == [ComputeStep(accepted("ac"))]


def test_a_later_exchange_below_quorum_restarts_the_round() -> None:
    """A client of exchange 1 cannot be replaced: stragglers stop, and the round is redrawn as another attempt."""
    state = play(collecting(exchanges=2, quorum=3), *arrive("abc"), ExchangeReduced(), *arrive("a"))[0]
    state, commands = play(state, DeadlinePassed())
    assert commands == [
        QuorumMissed(round=0, exchange=1, attempt=0, admitted=1, quorum=3),
        RestartRound(0, "exchange 1 had 1 update, and needs 3", states=False), Cancel(("b", "c"), 1),
        OpenAttempt(round=0, exchange=0, attempt=1, cohort=("a", "b", "c")),
    ]  # fmt: skip
    assert (state.exchange, state.admitted, state.accepted) == (0, (), ())


def test_a_restart_without_working_clients_cancels_none() -> None:
    """When the last client of exchange 1 fails, no client has to stop."""
    state = play(collecting("a", exchanges=2), *arrive("a"), ExchangeReduced())[0]
    why = "exchange 1 had 0 updates, and needs 1"
    opened = OpenAttempt(round=0, exchange=0, attempt=1, cohort=("a",))
    assert play(state, *leave("a"))[1][1:] == [RestartRound(0, why, states=False), opened]


def test_a_round_that_restarts_while_paused_waits() -> None:
    """A restart abandons the round, so a pause takes effect."""
    state = play(collecting("a", exchanges=2), *arrive("a"), ExchangeReduced(), PauseRequested(), *leave("a"))[0]
    assert (state.phase, state.attempt) == (Phase.SELECTING, 1)
    assert advance(state, ResumeRequested())[1] == (OpenAttempt(0, 0, 1, ("a",)),)
