"""A run with a buffer under any order of events and kills: nothing is lost, counts twice or is too stale."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fl_server.rounds.by_client import BufferedUpdate, Refused, Work
from fl_server.rounds.effects import (
    Announce,
    Cancel,
    ComputeStep,
    DropCulprits,
    Effect,
    EndRun,
    OpenAttempt,
    RestartRound,
)
from fl_server.rounds.events import (
    ClientDroppedOut,
    ClientReturned,
    CulpritsFound,
    DeadlinePassed,
    EndRequested,
    Evaluated,
    Event,
    Extended,
    ModelCommitted,
    PauseRequested,
    ResumeRequested,
    RetryDue,
    RosterChanged,
    RoundRestored,
    StepComputed,
    UpdateAdmitted,
    UpdateRefused,
    WorkFailed,
)
from fl_server.rounds.machine import BUFFERED_RULES, advance
from fl_server.rounds.restoring import SavedRound, restored_round, without_absent
from fl_server.rounds.sampling import RoundPolicy, by_id
from fl_server.rounds.state import Phase, RoundState, UnexpectedEvent
from tests.fl_server.rounds.delivering import expected_next

CLIENTS = ("a", "B", "c", "é", "z", "10")
clients = st.sampled_from(CLIENTS)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(RosterChanged, st.lists(clients, unique=True).map(tuple), settled=st.booleans()),
    st.builds(UpdateAdmitted, st.tuples(st.tuples(clients, st.binary(max_size=1)))),
    st.builds(ClientDroppedOut, clients),
    st.builds(ClientReturned, clients),
    st.builds(WorkFailed, clients, cause=st.sampled_from(("", "task.py:3"))),
    st.builds(UpdateRefused, clients, st.just("norm"), st.just("too long")),
    st.builds(DeadlinePassed, st.integers(0, 4), st.integers(0, 4)),
    st.sampled_from((RetryDue(), StepComputed(), ModelCommitted(), Evaluated(), PauseRequested(), ResumeRequested())),
)
policies = st.builds(
    RoundPolicy,
    seed=st.integers(0, 3),
    close=st.just("buffer"),
    min_clients=st.integers(1, 3),
    concurrency=st.integers(1, 5),
    goal=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    evaluate_every=st.integers(0, 2),
    await_evaluation=st.booleans(),
)


class AnyOrder(RuleBasedStateMachine):
    """A run that gets any event at any time, and the ledger that its driver would keep."""

    @initialize(policy=policies, rounds=st.integers(1, 4))
    def create(self, policy: RoundPolicy, rounds: int) -> None:
        self.state = RoundState(policy, rounds)
        self.attempts: dict[tuple[int, int], tuple[str, ...]] = {}
        self.updates: dict[tuple[int, str], bytes | None] = {}
        """(version, client) -> digest in order of arrival; None: it was refused."""
        self.lists: dict[int, list[tuple[int, str]]] = {}
        """The (version, client) of each step's list."""
        self.committed = 0
        self.given_up: set[tuple[int, str]] = set()

    @rule(event=events)
    def anything(self, event: Event) -> None:
        self.apply(event)

    @rule(data=st.data())
    @precondition(lambda self: self.state.drawn)
    def a_client_delivers(self, data: st.DataObject) -> None:
        """One with a slot or without."""
        client = data.draw(st.sampled_from(by_id(self.state.drawn)))
        self.apply(UpdateAdmitted(((client, client.encode()),)))

    @rule(data=st.data())
    @precondition(lambda self: self.state.phase is Phase.STEPPING)
    def updates_spoil_the_step(self, data: st.DataObject) -> None:
        gone = data.draw(
            st.lists(st.sampled_from([client for client, _ in self.state.accepted]), unique=True, min_size=1)
        )
        self.apply(CulpritsFound(tuple((client, "too long") for client in gone)))

    @rule(status=st.sampled_from(("completed", "stopped", "failed")), go_on=st.booleans())
    @precondition(lambda self: self.state.round > 0)
    def it_ends(self, status: str, go_on: bool) -> None:
        self.apply(EndRequested(status, "why"))  # type: ignore[arg-type]
        if go_on and self.state.phase is Phase.ENDED and status != "stopped":
            self.apply(Extended(self.state.rounds + 1) if status == "completed" else ResumeRequested())

    @rule(data=st.data())
    @precondition(lambda self: self.state.phase is not Phase.ENDED)
    def it_is_killed(self, data: st.DataObject) -> None:
        """It comes back with what the ledger has. A commit under way is made or not; some clients are away."""
        state, round_ = self.state, self.state.round
        if state.phase is Phase.COMMITTING and data.draw(st.booleans()):
            self.commit(round_)
            round_ += 1
        first = max(0, round_ - state.policy.max_staleness)
        fixed = self.lists.get(round_, []) if round_ == self.committed else []
        waiting = [*fixed, *(key for key in self.waiting() if key not in fixed)]
        assigned = {
            client: Work(version, attempt)
            for (version, attempt), cohort in sorted(self.attempts.items())
            if version >= first
            for client in cohort
        }
        refused = [client for (version, client), one in self.updates.items() if one is None and version == round_]
        saved = SavedRound(
            [(0, attempt, cohort) for (version, attempt), cohort in self.attempts.items() if version == round_],
            work={client: one for client, one in assigned.items() if (one.version, client) not in self.updates},
            buffer=tuple(BufferedUpdate(client, version, b"") for version, client in waiting),
            refused=dict.fromkeys(refused, Refused("norm", "")),
        )
        fresh = RoundState(state.policy, state.rounds, round=round_, paused=state.paused)
        present = data.draw(st.sets(clients))
        self.state = without_absent(restored_round(fresh, saved), present)
        self.apply(RoundRestored())

    @rule()
    def continue_normally(self) -> None:
        self.apply(expected_next(self.state))

    def apply(self, event: Event) -> None:
        before, copy = self.state, replace(self.state)
        try:
            after, effects = advance(before, event)
        except UnexpectedEvent:
            assert self.state is before
            return
        assert (before.phase, type(event)) in BUFFERED_RULES
        assert before == copy
        if isinstance(event, UpdateAdmitted):
            for client, digest in event.updates:
                key = (before.work[client].version, client)
                assert key not in self.updates
                self.updates[key] = digest
        if isinstance(event, UpdateRefused):
            self.updates[before.work[event.client].version, event.client] = None
        self.state = after
        for effect in effects:
            self.record(effect, before)

    def record(self, effect: Effect, before: RoundState) -> None:
        if isinstance(effect, OpenAttempt):
            key = (effect.round, effect.attempt)
            assert key not in self.attempts
            assert not any((effect.round, client) in self.updates for client in effect.cohort)
            assert set(effect.cohort) <= set(self.state.eligible)
            self.attempts[key] = effect.cohort
        elif isinstance(effect, ComputeStep):
            round_ = self.state.round
            taken = [(version, client) for (client, _), version in zip(effect.accepted, effect.versions, strict=True)]
            assert len(taken) == len(set(taken)) == self.state.policy.goal
            assert all(0 <= round_ - version <= self.state.policy.max_staleness for version, _ in taken)
            assert self.lists.get(round_, taken) == taken
            self.lists[round_] = taken
        elif isinstance(effect, DropCulprits):
            for (client, _), version in zip(effect.culprits, effect.versions, strict=True):
                self.updates[version, client] = None
            del self.lists[effect.round]
        elif isinstance(effect, Announce):
            self.commit(effect.round)
        elif isinstance(effect, Cancel):
            assert all(
                before.work[client].version == version
                for client, version in zip(effect.clients, effect.rounds, strict=True)
            )
        elif isinstance(effect, RestartRound | EndRun):
            self.forget(effect)

    def commit(self, round_: int) -> None:
        assert round_ == self.committed
        assert round_ in self.lists
        self.committed += 1

    def waiting(self) -> list[tuple[int, str]]:
        """The admitted updates that no committed step has, in the order of arrival."""
        counted = {key for step in range(self.committed) for key in self.lists[step]}
        return [key for key, digest in self.updates.items() if digest is not None and key not in counted]

    def forget(self, effect: RestartRound | EndRun) -> None:
        """The rows of a round that is redrawn, or of all updates in the buffer at the end."""
        refused = [key for key, digest in self.updates.items() if digest is None]
        for key in [*self.waiting(), *refused]:
            if isinstance(effect, EndRun) or key[0] == effect.round:
                del self.updates[key]
        if isinstance(effect, RestartRound):
            self.attempts = {key: one for key, one in self.attempts.items() if key[0] != effect.round}
        self.lists = {step: one for step, one in self.lists.items() if step < self.committed}

    @invariant()
    def each_admitted_update_is_in_the_buffer_or_in_one_step(self) -> None:
        state = self.state
        counted = [key for step in range(self.committed) for key in self.lists[step]]
        assert len(counted) == len(set(counted))
        stepping = state.phase in (Phase.STEPPING, Phase.COMMITTING)
        taken = self.lists.get(self.committed, []) if stepping else []
        here = [*taken, *((one.version, one.client) for one in state.buffer)]
        assert sorted(here) == sorted(self.waiting())

    @invariant()
    def no_more_than_may_work(self) -> None:
        state = self.state
        assert len(state.outstanding) == state.working <= state.policy.concurrency
        assert state.drawn == state.work.keys()
        assert state.out <= state.drawn

    @invariant()
    def rounds_are_committed_in_order(self) -> None:
        assert self.committed == self.state.round
        assert self.state.round <= self.state.rounds

    @invariant()
    def work_can_still_count_or_a_step_is_under_way(self) -> None:
        state = self.state
        assert (
            state.computing
            or not state.buffer
            or len(state.buffer) >= state.policy.goal
            or not any(state.too_stale(work.version) for work in state.work.values())
        )

    def teardown(self) -> None:
        """From any state, a fleet that is large enough brings the run to its end."""
        if not hasattr(self, "state"):
            return
        self.apply(ResumeRequested())
        fleet = tuple(f"n{number}" for number in range(40))
        self.apply(RosterChanged((*CLIENTS, *fleet), settled=True))
        limit = 200
        while self.state.phase is not Phase.ENDED and limit:
            self.apply(expected_next(self.state))
            limit -= 1
        assert self.state.phase is Phase.ENDED, self.state


class TestAnyOrder(AnyOrder.TestCase):  # type: ignore[misc, valid-type] # hypothesis makes this class
    """100 orders of up to 40 events break no invariant, and each run that they lead to can end."""

    settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestManyOrders(AnyOrder.TestCase):  # type: ignore[misc, valid-type]  # as above
    """5,000 of them."""

    settings = settings(max_examples=5000, stateful_step_count=40, deadline=None)
