"""The work of a round: in proportion to its clients, counted in comparisons and hashes of their ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from fl_server.rounds.events import ClientDroppedOut, ClientReturned, Event, RosterChanged, UpdateAdmitted
from fl_server.rounds.machine import advance, applies
from fl_server.rounds.sampling import RoundPolicy
from fl_server.rounds.state import Phase, RoundState

CLIENTS = 800


class Id(str):
    """A client id that counts how often it is compared or hashed."""

    __slots__ = ()
    uses = 0

    def __eq__(self, other: object) -> bool:
        Id.uses += 1
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        Id.uses += 1
        return str.__hash__(self)


def uses_a_client(state: RoundState, events: Iterable[Event]) -> tuple[RoundState, float]:
    """The last state, and the uses of ids in events of a round as the driver processes them, divided by CLIENTS."""
    reserved = set(state.outstanding)
    Id.uses = 0
    for event in events:
        if applies(event, state):
            before, (state, _) = state, advance(state, event)
            begun, done = state.workers_since(before)
            reserved = (reserved | begun) - done if len(begun) + len(done) > 1 else reserved
            for client in begun:
                reserved.add(client)
            for client in done:
                reserved.discard(client)
    uses = Id.uses
    assert reserved == state.outstanding
    return state, uses / CLIENTS


@pytest.fixture
def clients() -> list[str]:
    """Their ids."""
    return [Id(f"client-{number:04d}") for number in range(CLIENTS)]


@pytest.fixture
def collecting(clients: list[str]) -> RoundState:
    """A run that has drawn all of them."""
    start = RoundState(RoundPolicy(seed=7, clients_per_round=CLIENTS), 1)
    return advance(start, RosterChanged(tuple(clients), settled=True))[0]


def test_arriving_updates(clients: list[str], collecting: RoundState) -> None:
    """A search through the updates that came before would use every id hundreds of times."""
    state, uses = uses_a_client(collecting, [UpdateAdmitted(((client, b""),)) for client in clients])
    assert state.phase is Phase.STEPPING
    assert uses < 60


def test_updates_that_came_before_are_not_searched(clients: list[str], collecting: RoundState) -> None:
    """For a repeat, which changes nothing."""
    half = replace(collecting, admitted=[(client, b"") for client in clients[: CLIENTS // 2]])
    state, uses = uses_a_client(half, [UpdateAdmitted(((client, b""),)) for client in clients[: CLIENTS // 2]])
    assert state is half
    assert uses < 60


def test_clients_that_leave_and_return(clients: list[str], collecting: RoundState) -> None:
    """One after the other."""
    events = [event for client in clients for event in (ClientDroppedOut(client), ClientReturned(client))]
    state, uses = uses_a_client(collecting, events)
    assert (state.phase, state.out) == (Phase.COLLECTING, frozenset())
    assert uses < 120
