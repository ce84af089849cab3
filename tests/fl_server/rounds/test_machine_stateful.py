"""The round state machine under any order of events: invariants after each event, and that every run can end."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import fields, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fl_server.rounds.effects import (
    Announce,
    Cancel,
    Commit,
    ComputeStep,
    Effect,
    OpenAttempt,
    ReduceExchange,
    RestartRound,
)
from fl_server.rounds.events import (
    Accepted,
    ClientDroppedOut,
    ClientReturned,
    CulpritsFound,
    DeadlinePassed,
    EndRequested,
    Evaluated,
    Event,
    ExchangeReduced,
    Extended,
    ModelCommitted,
    PauseRequested,
    ResumeRequested,
    RetryDue,
    RosterChanged,
    RoundRestored,
    StatesLost,
    StepComputed,
    UpdateAdmitted,
)
from fl_server.rounds.machine import RULES, advance
from fl_server.rounds.sampling import RoundPolicy, bounds, by_id
from fl_server.rounds.state import Phase, RoundState, UnexpectedEvent
from tests.fl_server.rounds.delivering import expected_next

CLIENTS = ("a", "B", "c", "é", "z", "10")
P = Phase
MOVES = {
    P.SELECTING: {P.SELECTING, P.COLLECTING, P.REDUCING, P.STEPPING, P.ENDED},
    P.COLLECTING: {P.SELECTING, P.COLLECTING, P.REDUCING, P.STEPPING, P.ENDED},
    P.REDUCING: {P.REDUCING, P.SELECTING, P.COLLECTING, P.STEPPING, P.ENDED},
    P.STEPPING: {P.STEPPING, P.COMMITTING, P.SELECTING, P.COLLECTING, P.REDUCING, P.ENDED},
    P.COMMITTING: {P.COMMITTING, P.SELECTING, P.COLLECTING, P.EVALUATING, P.ENDED},
    P.EVALUATING: {P.EVALUATING, P.SELECTING, P.COLLECTING, P.ENDED},
    P.ENDED: {P.ENDED, P.SELECTING, P.COLLECTING},
}
"""The phases that one event may lead to, by phase."""

clients = st.sampled_from(CLIENTS)
rosters = st.builds(RosterChanged, st.lists(clients, unique=True).map(tuple), settled=st.booleans())
events: st.SearchStrategy[Event] = st.one_of(
    rosters,
    st.builds(UpdateAdmitted, st.tuples(st.tuples(clients, st.binary(max_size=1)))),
    st.builds(ClientDroppedOut, clients),
    st.builds(ClientReturned, clients),
    st.sampled_from(
        (DeadlinePassed(), RoundRestored(), RetryDue(), ExchangeReduced(), StepComputed(), ModelCommitted())
    ),
    st.builds(Evaluated, st.sampled_from(("server", "clients"))),
    st.sampled_from((PauseRequested(), ResumeRequested())),
    st.builds(Extended, st.integers(0, 6)),
    st.just(StatesLost("a: its disk is new")),
)
ends = st.builds(EndRequested, st.sampled_from(("completed", "stopped", "failed")), st.just("why"))
policies = st.builds(
    RoundPolicy,
    seed=st.integers(0, 3),
    sampling=st.sampled_from(("fixed", "bernoulli")),
    clients_per_round=st.integers(1, 5),
    rate=st.sampled_from((0.2, 0.7, 1.0)),
    min_clients=st.integers(1, 3),
    close=st.sampled_from(("cohort", "goal")),
    quorum=st.integers(1, 4),
    over_selection=st.sampled_from((1.0, 1.5, 3.0)),
    exchanges=st.integers(1, 3),
    population=st.sampled_from((0, 3, 5)),
    evaluate_every=st.integers(0, 2),
    await_evaluation=st.booleans(),
    ask_clients_every=st.integers(0, 2),
    await_clients=st.booleans(),
)


class AnyOrder(RuleBasedStateMachine):
    """A run that gets any event at any time, and the records that its driver would keep."""

    @initialize(policy=policies, rounds=st.integers(1, 4))
    def create(self, policy: RoundPolicy, rounds: int) -> None:
        self.state = RoundState(policy, rounds)
        self.opened: set[tuple[int, int, int]] = set()
        self.stepped: Accepted = ()
        self.committing: list[int] = []
        self.announced: list[int] = []
        self.updates: dict[tuple[int, int, int, str], bytes] = {}
        """(round, exchange, first attempt, client) -> the digest that was admitted."""
        self.counted: dict[int, Accepted] = {}

    # Events.

    @rule(event=events)
    def anything(self, event: Event) -> None:
        self.apply(event)

    @rule(event=ends)
    @precondition(lambda self: self.state.round > 0)
    def end(self, event: Event) -> None:
        self.apply(event)

    @rule(data=st.data(), kind=st.sampled_from((UpdateAdmitted, UpdateAdmitted, ClientDroppedOut)))
    @precondition(lambda self: self.state.outstanding)
    def a_client_is_done(self, data: st.DataObject, kind: type) -> None:
        client = data.draw(st.sampled_from(by_id(self.state.outstanding)))
        self.apply(
            ClientDroppedOut(client) if kind is ClientDroppedOut else UpdateAdmitted(((client, client.encode()),))
        )

    @rule(data=st.data())
    @precondition(lambda self: self.state.outstanding)
    def clients_are_done_together(self, data: st.DataObject) -> None:
        """No more than the goal lacks: the state and the commands are those of one event for each of them."""
        order = data.draw(st.permutations(by_id(self.state.outstanding)))
        updates = [(client, client.encode()) for client in order[: max(1, self.state.goal - len(self.state.admitted))]]
        state, commands = self.state, list[Effect]()
        for client, digest in updates:
            state, more = advance(state, UpdateAdmitted(((client, digest),)))
            commands += more
        event = UpdateAdmitted(tuple(updates))
        assert advance(self.state, event) == (state, tuple(commands))
        self.apply(event)

    @rule(data=st.data(), other=st.booleans())
    @precondition(lambda self: self.state.collects and self.state.admitted)
    def an_update_comes_again(self, data: st.DataObject, other: bool) -> None:
        """With the same bytes or with others: the first update stays."""
        client, digest = data.draw(st.sampled_from(self.state.admitted))
        before = self.state
        self.apply(UpdateAdmitted(((client, b"other" if other else digest),)))
        assert self.state is before

    @rule(data=st.data())
    @precondition(lambda self: self.state.phase in (Phase.REDUCING, Phase.STEPPING, Phase.COMMITTING))
    def the_power_is_cut(self, data: st.DataObject) -> None:
        """The coordinator restarts with the list that it had fixed and some of the bytes, but without a commit."""
        fixed = self.state.accepted
        if self.state.phase is Phase.COMMITTING:
            self.committing.pop()
        whole = data.draw(st.lists(st.sampled_from(fixed), unique=True).map(tuple))
        present = data.draw(st.sets(st.sampled_from(fixed)))
        out = {client for client, _ in set(fixed) - set(whole) - present}
        self.forget_updates({client for client, _ in set(fixed) - set(whole)})
        self.state = replace(
            self.state, phase=Phase.COLLECTING, goal=len(fixed), drawn=frozenset(client for client, _ in fixed),
            out=frozenset(out), admitted=whole, accepted=(), fixed=fixed, states_lost="", ending=None,
        )  # fmt: skip
        self.apply(RoundRestored())

    @rule(data=st.data())
    @precondition(lambda self: self.state.phase in (Phase.REDUCING, Phase.STEPPING))
    def updates_spoil_the_exchange(self, data: st.DataObject) -> None:
        """Some or all of the accepted updates are dropped; the exchange is closed again with the rest."""
        gone = data.draw(st.lists(st.sampled_from(self.state.accepted), unique=True, min_size=1))
        place = (self.state.round, self.state.exchange)
        self.apply(CulpritsFound(tuple((client, "too long") for client, _ in gone)))
        if (self.state.round, self.state.exchange) == place:
            self.forget_updates({client for client, _ in gone})
            assert not {client for client, _ in gone} & {client for client, _ in self.state.accepted}

    @rule(data=st.data())
    @precondition(lambda self: self.state.collects)
    def it_is_killed(self, data: st.DataObject) -> None:
        """The coordinator restarts in the same round without a roster, and may have lost the bytes of some updates."""
        state = self.state
        kept = data.draw(st.sets(st.sampled_from(state.admitted))) if state.admitted else set()
        admitted = tuple(entry for entry in state.admitted if entry in kept)
        away = state.drawn - {client for client, _ in admitted}
        out = data.draw(st.sets(st.sampled_from(by_id(away)))) if away else set()
        self.forget_updates(away)
        opened = [key[2] for key in self.opened if key[:2] == (state.round, state.exchange)]
        self.state = replace(
            state, phase=Phase.COLLECTING, attempt=max(opened), eligible=(), settled=False, admitted=admitted,
            out=frozenset(out), states_lost="",
        )  # fmt: skip
        self.apply(RoundRestored())

    @rule()
    def continue_normally(self) -> None:
        self.apply(expected_next(self.state))

    def apply(self, event: Event) -> None:
        before, copy = self.state, replace(self.state)
        legal = (before.phase, type(event)) in RULES
        try:
            self.state, commands = advance(before, event)
        except UnexpectedEvent:
            assert self.state is before
        else:
            assert legal
            assert self.state.phase in MOVES[before.phase]
            if isinstance(event, UpdateAdmitted):
                self.record_update(before, event)
            for command in commands:
                self.record(command, before)
        assert before == copy

    def record(self, command: Effect, before: RoundState) -> None:
        if isinstance(command, OpenAttempt):
            self.record_attempt(command)
        elif isinstance(command, Cancel):
            assert command.clients
            assert command.exchange == before.exchange
            assert command.clients == by_id(before.outstanding - {c for c, _ in self.state.admitted})
        elif isinstance(command, RestartRound):
            assert command.round == len(self.announced)
            assert not self.state.admitted or self.state.phase is P.ENDED
            assert not command.states or not self.state.members
        elif isinstance(command, ReduceExchange | ComputeStep):
            assert before.fixed in ((), command.accepted)
            self.stepped = command.accepted
            key = (before.round, before.exchange, before.first_attempt)
            assert all(self.updates[(*key, client)] == digest for client, digest in command.accepted)
        elif isinstance(command, Commit):
            self.committing.append(before.round)
        elif isinstance(command, Announce):
            self.announced.append(command.round)
            assert command.round not in self.counted
            self.counted[command.round] = self.stepped

    def record_update(self, before: RoundState, event: UpdateAdmitted) -> None:
        """A client's update is admitted once, until the round is redrawn."""
        for client, digest in event.updates:
            key = (before.round, before.exchange, before.first_attempt, client)
            assert key not in self.updates
            self.updates[key] = digest

    def forget_updates(self, clients: AbstractSet[str]) -> None:
        """Their bytes are damaged, lost, or never came: they may be admitted again."""
        place = (self.state.round, self.state.exchange, self.state.first_attempt)
        for client in clients:
            self.updates.pop((*place, client), None)

    def record_attempt(self, opened: OpenAttempt) -> None:
        key = (opened.round, opened.exchange, opened.attempt)
        assert key not in self.opened
        self.opened.add(key)
        assert opened.cohort == by_id(set(opened.cohort))
        assert set(opened.cohort) <= self.state.outstanding
        if opened.exchange:
            assert opened.cohort == tuple(client for client, _ in self.stepped)
        elif opened.cohort:
            assert self.state.settled
            assert set(opened.cohort) <= set(self.state.eligible)

    # Invariants.

    @invariant()
    def no_round_is_committed_twice(self) -> None:
        assert self.announced == list(range(self.state.round))
        assert self.committing in (self.announced, [*self.announced, self.state.round])

    @invariant()
    def no_client_counts_twice_in_a_round(self) -> None:
        assert all(len({client for client, _ in accepted}) == len(accepted) for accepted in self.counted.values())

    @invariant()
    def the_state_does_not_grow(self) -> None:
        """No field of the state is larger than the fleet, after any number of events."""
        values = [getattr(self.state, field.name) for field in fields(self.state)]
        assert all(len(value) <= len(CLIENTS) for value in values if isinstance(value, tuple | frozenset))

    @invariant()
    def over_selection_keeps_to_its_bounds(self) -> None:
        factor, start = self.state.over_selection, self.state.policy.over_selection
        lowest, highest = bounds(start)
        assert not factor or lowest - 1e-12 <= factor <= highest + 1e-12

    @invariant()
    def a_fixed_list_is_closed_unchanged_or_not_at_all(self) -> None:
        assert not self.state.fixed or self.state.phase in (Phase.COLLECTING, Phase.ENDED)

    @invariant()
    def each_drawn_client_has_one_status(self) -> None:
        state = self.state
        delivered = [client for client, _ in state.admitted]
        assert len(delivered) + len(state.out) + len(state.outstanding) == len(state.drawn)
        assert {*delivered, *state.out, *state.outstanding} == state.drawn

    @invariant()
    def the_population_is_not_exceeded(self) -> None:
        state = self.state
        assert not state.policy.population or len(state.members | state.drawn) <= state.policy.population

    @invariant()
    def only_a_collecting_run_has_working_clients(self) -> None:
        assert bool(self.state.outstanding) == (self.state.phase is Phase.COLLECTING)

    @invariant()
    def the_accepted_are_drawn_in_order_and_at_most_the_goal(self) -> None:
        state = self.state
        if state.phase in (Phase.REDUCING, Phase.STEPPING, Phase.COMMITTING):
            accepted = [client for client, _ in state.accepted]
            assert accepted == list(by_id(set(accepted) & state.drawn))
            assert state.quorum <= len(accepted) <= state.goal

    @invariant()
    def a_run_is_within_its_rounds_and_ends_for_a_reason(self) -> None:
        assert self.state.round <= self.state.rounds
        assert self.state.phase is not Phase.ENDED or self.state.ending is not None

    # Every run can end.

    def teardown(self) -> None:
        """From any state, present clients that deliver bring the run to its end."""
        if not hasattr(self, "state"):
            return
        self.apply(ResumeRequested())
        self.apply(RosterChanged(CLIENTS, settled=True))
        limit = 200
        while self.state.phase is not Phase.ENDED and limit:
            self.apply(expected_next(self.state))
            self.no_round_is_committed_twice()
            limit -= 1
        assert self.state.phase is Phase.ENDED


class TestAnyOrder(AnyOrder.TestCase):  # type: ignore[misc, valid-type] # hypothesis makes this class
    """150 orders of up to 30 events break no invariant, and each run that they lead to can end."""

    settings = settings(max_examples=75, stateful_step_count=30, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestManyOrders(AnyOrder.TestCase):  # type: ignore[misc, valid-type]  # as above
    """5,000 of them."""

    settings = settings(max_examples=5000, stateful_step_count=30, deadline=None)
