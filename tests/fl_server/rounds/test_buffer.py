"""The rules of a run with a buffer: who works, which updates a step takes, and what their staleness is."""

from __future__ import annotations

from typing import Any

import pytest

from fl_server.rounds.by_client import BufferedUpdate, ByClient, Refused, Work
from fl_server.rounds.collecting import too_many_processes
from fl_server.rounds.effects import (
    Announce,
    AwaitClients,
    Cancel,
    ComputeStep,
    DeadlineMissed,
    DropCulprits,
    Effect,
    EndRun,
    OpenAttempt,
    RecordFailure,
    RestartRound,
    RetryLater,
)
from fl_server.rounds.events import (
    ClientRestarted,
    ClientReturned,
    CulpritsFound,
    DeadlinePassed,
    Evaluated,
    Extended,
    ModelCommitted,
    PauseRequested,
    ResumeRequested,
    RetryDue,
    RosterChanged,
    RoundRestored,
    StepComputed,
    UpdateRefused,
    WorkFailed,
)
from fl_server.rounds.machine import advance, applies
from fl_server.rounds.restoring import SavedRound, restored_round, without_absent
from fl_server.rounds.sampling import RoundPolicy
from fl_server.rounds.state import Phase, RoundState, UnexpectedEvent, replace
from tests.fl_server.round_play import COMMIT, STOP, arrive, leave, play


def buffered(clients: str = "abcdef", rounds: int = 9, **policy: Any) -> RoundState:
    """A run in its first round, with a step of two updates and three clients at work."""
    given = {"concurrency": 3, "goal": 2, "max_staleness": 3, "evaluate_every": 0, **policy}
    start = RoundState(RoundPolicy(seed=7, close="buffer", **given), rounds)
    return advance(start, RosterChanged(tuple(clients), settled=True))[0]


def at_work(state: RoundState) -> str:
    """The clients that work, in the order of id."""
    return "".join(sorted(state.outstanding))


def drawn_in(effects: list[Effect]) -> list[tuple[int, int, str]]:
    """(round, attempt, clients) of each draw."""
    return [
        (effect.round, effect.attempt, "".join(effect.cohort)) for effect in effects if isinstance(effect, OpenAttempt)
    ]


def test_a_round_opens_without_a_client_whose_earlier_work_was_refused() -> None:
    """The refusal lasts for the round, so a minimum with that client would never be met."""
    none = ByClient[Any]()
    waiting = replace(
        buffered("abc", min_clients=3), phase=Phase.SELECTING, settled=False, goal=0, drawn=frozenset("c"), work=none,
        out=frozenset("c"), refused=ByClient({"c": Refused("not_finite", "expected finite values")}), round=2,
    )  # fmt: skip
    state, effects = advance(waiting, RosterChanged(("a", "b", "c"), settled=True))
    assert drawn_in(list(effects)) == [(2, 0, "ab")]
    assert state.phase is Phase.COLLECTING


def test_a_run_begins_with_as_many_clients_as_may_work() -> None:
    """The first draw fills all slots; the same seed draws the same clients."""
    state = buffered()
    assert len(state.outstanding) == 3
    assert state.work == buffered().work
    assert set(state.work.values()) == {Work(0, 0)}


def test_a_delivery_frees_a_slot_for_an_idle_client() -> None:
    """Who has delivered the current model's update is not drawn for it again."""
    state = buffered()
    first = at_work(state)[0]
    state, effects = play(state, *arrive(first))
    ((round_, attempt, drawn),) = drawn_in(effects)
    assert (round_, attempt) == (0, 1)
    assert len(drawn) == 1
    assert drawn != first
    assert first not in state.outstanding
    assert state.buffer == (BufferedUpdate(first, 0, first.encode()),)


def test_the_step_takes_the_first_updates_in_the_order_of_arrival() -> None:
    """And cancels nobody."""
    state = buffered()
    a, b, *_ = list(at_work(state))
    state, effects = play(state, *arrive(b + a))
    assert effects[-1] == ComputeStep(((b, b.encode()), (a, a.encode())), (0, 0))
    assert state.phase is Phase.STEPPING
    assert not any(isinstance(effect, Cancel) for effect in effects)
    assert len(state.outstanding) == 2  # the third, and the one that was drawn after the first delivery


@pytest.mark.parametrize("after", [(), (StepComputed(),)], ids=["stepping", "committing"])
def test_an_update_that_comes_while_a_model_is_computed_counts_in_the_next_step(after: tuple[Any, ...]) -> None:
    """It is of the older version, so its staleness is 1 there; nobody is drawn before the commit."""
    state = buffered()
    a, b, c = list(at_work(state))
    state, _ = play(state, *arrive(a + b), *after)
    state, effects = play(state, *arrive(c))
    assert not effects
    state, effects = play(state, *COMMIT[len(after) :])
    assert state.buffer == (BufferedUpdate(c, 0, c.encode()),)
    assert state.round == 1
    assert len(state.outstanding) == 3
    other = next(client for client in at_work(state) if state.work[client].version == 1)
    state, effects = play(state, *arrive(other))
    assert effects[-1] == ComputeStep(((c, c.encode()), (other, other.encode())), (0, 1))


def test_a_commit_draws_those_whose_updates_it_has() -> None:
    """They are idle, and have not had the new version."""
    state = buffered("abc")
    a, b, c = list(at_work(state))
    state, effects = play(state, *arrive(a + b), *COMMIT)
    assert drawn_in(effects) == [(1, 0, a + b)]
    assert [state.work[client] for client in (a, b, c)] == [Work(1, 0), Work(1, 0), Work(0, 0)]


def test_a_client_may_be_in_one_step_with_two_versions() -> None:
    """It delivers late, is drawn for the current model at once, and delivers that too."""
    state = buffered("abc")
    a, b, c = list(at_work(state))
    state, _ = play(state, *arrive(a + b), *COMMIT, *arrive(c))
    assert state.work[c] == Work(1, 1)
    state, effects = play(state, *arrive(c))
    assert effects[-1] == ComputeStep(((c, c.encode()), (c, c.encode())), (0, 1))


def test_work_that_became_too_stale_is_withdrawn_at_the_commit() -> None:
    """Its update could count in no step any more; the cancelled key is that of its version."""
    state = buffered("abcdef", max_staleness=0)
    a, b, *others = list(at_work(state))
    state, effects = play(state, *arrive(a + b))
    slow = at_work(state)
    state, effects = play(state, *COMMIT)
    assert Cancel(tuple(slow), 0, (0,) * len(slow)) in effects
    assert {work.version for work in state.work.values()} == {1}
    assert state.not_wanted((0, 0), slow[0]) == "stale"
    assert others


def test_an_update_is_too_stale_by_the_step_in_which_it_would_count() -> None:
    """While a model is computed that is the next one; with a full buffer before it, one later."""
    state = buffered("abcdefgh", concurrency=6, max_staleness=1)
    six = at_work(state)
    state, _ = play(state, *arrive(six[:2]))
    assert state.phase is Phase.STEPPING
    assert [state.too_stale(0) for _ in "x"] == [False]
    state, _ = play(state, *arrive(six[2:4]))
    assert state.not_wanted((0, 0), six[4]) == "stale"
    state, effects = play(state, *COMMIT)
    assert [effect.versions for effect in effects if isinstance(effect, ComputeStep)] == [(0, 0)]


def test_a_lost_client_gives_its_slot_to_another_and_may_still_deliver() -> None:
    """As long as it has no other work."""
    state = buffered()
    lost = at_work(state)[0]
    state, effects = play(state, *leave(lost))
    assert len(drawn_in(effects)) == 1
    assert len(state.outstanding) == 3
    assert not applies(ClientReturned(lost), state)  # there is no slot for it
    state, _ = play(state, *arrive(lost))
    assert state.buffer[0].client == lost


def test_a_client_that_returns_goes_on_with_its_work_if_a_slot_is_free() -> None:
    """Here the fleet is as small as the number of slots."""
    state, _ = play(buffered("abc"), *leave("a"))
    assert at_work(state) == "bc"
    state, effects = play(state, ClientReturned("a"))
    assert not effects
    assert at_work(state) == "abc"


def test_a_failed_client_is_drawn_again_for_the_next_version() -> None:
    """For the current one only if nobody else can deliver."""
    state = buffered("abc")
    state, effects = play(state, WorkFailed("a", "no memory"))
    assert not drawn_in(effects)
    state, effects = play(state, *arrive("bc"), *COMMIT)
    assert drawn_in(effects) == [(1, 0, "abc")]


def test_a_run_without_clients_waits_and_asks_those_that_failed_again() -> None:
    """The retry draws them for the same version, as a new attempt."""
    state = buffered("ab", concurrency=2)
    state, effects = play(state, WorkFailed("a"), WorkFailed("b"))
    assert state.phase is Phase.SELECTING
    assert effects == [AwaitClients(2, 0), RetryLater()]
    state, effects = play(state, RetryDue())
    assert drawn_in(effects) == [(0, 1, "ab")]


def test_a_new_client_is_drawn_as_soon_as_it_is_here() -> None:
    """Into a free slot."""
    state, effects = play(buffered("ab"), RosterChanged(("a", "b", "c"), settled=True))
    assert drawn_in(effects) == [(0, 1, "c")]
    assert state.working == 3


def test_each_draw_has_a_deadline_of_its_own() -> None:
    """A passed one takes the slots of its draw alone."""
    state = buffered()
    a, b, c = list(at_work(state))
    state, _ = play(state, *arrive(a))
    (new,) = set(at_work(state)) - {b, c}
    state, effects = play(state, DeadlinePassed(0, 1))
    assert DeadlineMissed((new,)) in effects
    assert {b, c} <= state.outstanding
    assert not applies(ClientReturned(new), state)
    state, effects = play(state, DeadlinePassed(0, 0))
    assert not any(isinstance(effect, DeadlineMissed) for effect in effects)  # two missed it, and one kept it


def test_a_refused_update_frees_the_slot() -> None:
    """And its client is not drawn again for this round."""
    state = buffered("abcd")
    first = at_work(state)[0]
    state, effects = play(state, UpdateRefused(first, "norm", "too long"))
    assert len(drawn_in(effects)) == 1
    assert first not in state.outstanding
    state, _ = play(state, RosterChanged(("a", "b", "c", "d"), settled=True))
    assert first not in state.outstanding


def test_a_culprit_leaves_the_step_and_the_others_stay_first() -> None:
    """The step that follows has them, and the update that came meanwhile."""
    state = buffered()
    a, b, c = list(at_work(state))
    state, _ = play(state, *arrive(a + b + c))
    assert state.phase is Phase.STEPPING
    state, effects = play(state, CulpritsFound(((a, "too long"),), "norm"))
    assert effects[0] == DropCulprits(0, 0, ((a, "too long"),), "norm", (0,))
    assert effects[-1] == ComputeStep(((b, b.encode()), (c, c.encode())), (0, 0))


def test_a_pause_opens_no_round_but_its_clients_go_on() -> None:
    """What they deliver is in the buffer when the run is resumed."""
    state = buffered("abc")
    state, _ = play(state, PauseRequested(), *arrive("ab"), *COMMIT)
    assert state.phase is Phase.SELECTING
    assert at_work(state) == "c"
    state, effects = play(state, *arrive("c"))
    assert not effects
    state, effects = play(state, ResumeRequested())
    assert drawn_in(effects) == [(1, 0, "abc")]
    assert len(state.buffer) == 1


def test_clients_work_on_while_an_evaluation_is_awaited() -> None:
    """And a buffer that is full then makes the next step at once."""
    state = buffered("abcd", concurrency=4, evaluate_every=1, await_evaluation=True)
    state, _ = play(state, *arrive("ab"), *COMMIT)
    assert state.phase is Phase.EVALUATING
    state, effects = play(state, *arrive("cd"))
    assert not effects
    state, effects = play(state, Evaluated())
    assert effects[-1] == ComputeStep((("c", b"c"), ("d", b"d")), (0, 0))


def test_the_last_commit_cancels_all_that_still_work() -> None:
    """Each by the key of its version."""
    state = buffered("abc", rounds=1)
    state, effects = play(state, *arrive("ab"), *COMMIT)
    assert state.phase is Phase.ENDED
    assert not state.outstanding
    names = [type(effect) for effect in effects[-3:]]
    assert names == [Announce, Cancel, EndRun]
    assert effects[-2] == Cancel(("c",), 0, (0,))


def test_a_run_that_ended_in_a_round_draws_it_anew() -> None:
    """Its updates were given up with the end."""
    state, _ = play(buffered("abc"), *arrive("a"), STOP)
    assert (state.phase, state.buffer, dict(state.work)) == (Phase.ENDED, (), {})
    state = RoundState(state.policy, 3, phase=Phase.ENDED, ending=("completed", ""), goal=2, attempt=4)
    state, effects = play(state, RosterChanged(("a", "b", "c"), settled=True), Extended(5))
    assert isinstance(effects[0], RestartRound)
    assert drawn_in(effects) == [(0, 5, "abc")]


def test_two_updates_of_one_piece_of_work_are_refused() -> None:
    """The state does not change."""
    state, _ = play(buffered(), *arrive("a" if "a" in buffered().outstanding else at_work(buffered())[0]))
    (first, _, _), *_ = state.buffer
    with pytest.raises(UnexpectedEvent, match="has no work"):
        play(state, *arrive(first))
    assert state.not_wanted((0, 0), first) == "late"


def test_a_restart_in_a_step_makes_the_same_step() -> None:
    """The fixed list is the beginning of the buffer, and work of all versions goes on."""
    state = buffered("abc")
    state, _ = play(state, *arrive("ab"), *COMMIT, *arrive("cab"))
    assert state.accepted == (("c", b"c"), ("a", b"a"))
    fresh = RoundState(state.policy, state.rounds, round=1)
    taken = tuple(
        BufferedUpdate(client, version, digest)
        for (client, digest), version in zip(state.accepted, state.versions, strict=True)
    )
    saved = SavedRound([(0, 0, ("a", "b")), (0, 1, ("c",))], work=dict(state.work), buffer=(*taken, *state.buffer))
    again = without_absent(restored_round(fresh, saved), {"a", "b", "c"})
    again, effects = advance(again, RoundRestored())
    assert effects == (ComputeStep(state.accepted, state.versions),)
    assert (again.buffer, again.work, again.outstanding) == (state.buffer, state.work, state.outstanding)


def test_a_model_is_committed_while_its_clients_work() -> None:
    """ModelCommitted keeps them, and their restarts."""
    state, _ = play(buffered("abcd", concurrency=4), *arrive("ab"), StepComputed())
    before = at_work(state)
    state, _ = play(state, ModelCommitted())
    assert set(before) <= state.outstanding


def test_a_fault_of_clients_ends_no_run_whose_step_is_under_way() -> None:
    """Its updates were delivered: two clients got values that are not finite, but not all."""
    state = buffered("abcd", concurrency=4)
    state, effects = play(state, *arrive("ab"), StepComputed(), *(WorkFailed(each, not_finite=True) for each in "cd"))
    assert state.phase is Phase.COMMITTING
    assert not any(isinstance(effect, EndRun) for effect in effects)


def test_a_restart_gives_out_no_more_slots_than_there_are() -> None:
    """A client that had lost its slot is here again, and so is the one that got it; the ledger has work of both."""
    state = buffered("abcd")
    first = at_work(state)[0]
    state, _ = play(state, *leave(first))
    saved = SavedRound([(0, 0, ("a", "b", "c")), (0, 1, ("d",))], work=dict(state.work))
    again = without_absent(restored_round(RoundState(state.policy, 3), saved), set("abcd"))
    assert again.working == 3
    assert {client for client, work in again.work.items() if work.attempt} <= again.outstanding


def test_a_restart_keeps_the_count_of_processes_of_a_client_that_is_drawn_again() -> None:
    """A full buffer makes its work too stale; with a culprit out of it, the client is drawn for this version again."""
    state = buffered("abc", max_staleness=0, most_processes=2)
    kept = tuple(BufferedUpdate(client, 0, client.encode()) for client in "ab")
    saved = SavedRound([(0, 0, ("a", "b", "c"))], restarts={"c": 1}, work={"c": Work(0, 0)}, buffer=kept)
    again, _ = advance(restored_round(RoundState(state.policy, 3), saved), RoundRestored())
    again, _ = advance(again, RosterChanged(("a", "b", "c"), settled=True))
    assert (again.phase, again.outstanding) == (Phase.STEPPING, frozenset())
    again, effects = advance(again, CulpritsFound((("a", "it is NaN"),)))
    assert drawn_in(list(effects)) == [(0, 1, "c")]
    again, effects = advance(again, ClientRestarted("c"))
    assert RecordFailure("c", too_many_processes(2)) in effects
