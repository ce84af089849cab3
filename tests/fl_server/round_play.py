"""Rounds for tests of the state machine: a state in each phase, and a few words to play events with."""

from __future__ import annotations

from typing import Any

from fl_server.events import (
    ClientOut,
    Command,
    Committed,
    EndRequested,
    Evaluated,
    Event,
    RosterChanged,
    Stepped,
    UpdateAdmitted,
)
from fl_server.round_state import Phase, RoundPolicy, RoundState
from fl_server.rounds import advance

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
