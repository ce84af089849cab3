"""Helpers for tests of the state machine: apply events, short names for common events, and a state in each phase."""

from __future__ import annotations

from typing import Any

from fl_server.rounds.effects import Effect
from fl_server.rounds.events import (
    ClientDroppedOut,
    EndRequested,
    Evaluated,
    Event,
    Graph,
    GraphMade,
    ModelCommitted,
    RosterChanged,
    StageAnswered,
    StepComputed,
    UpdateAdmitted,
)
from fl_server.rounds.machine import advance
from fl_server.rounds.sampling import RoundPolicy
from fl_server.rounds.state import Phase, RoundState

ALL = tuple("abcdefgh")
STOP = EndRequested("stopped", "stopped by an operator")
COMMIT = (StepComputed(), ModelCommitted())


def play(state: RoundState, *events: Event) -> tuple[RoundState, list[Effect]]:
    """Apply events in order. Returns the last state and all commands."""
    commands: list[Effect] = []
    for event in events:
        state, more = advance(state, event)
        commands += more
    return state, commands


def collecting(clients: str = "abc", rounds: int = 3, **policy: Any) -> RoundState:
    """A run that collects in round 0; it drew all of `clients` unless the policy prevents it."""
    start = RoundState(RoundPolicy(seed=7, **{"clients_per_round": len(clients), **policy}), rounds)
    return advance(start, RosterChanged(tuple(clients), settled=True))[0]


def arrive(clients: str) -> list[Event]:
    """An admitted update of each of these clients."""
    return [UpdateAdmitted(((client, client.encode()),)) for client in clients]


def leave(clients: str) -> list[Event]:
    """An event for each of these clients: it will not deliver."""
    return [ClientDroppedOut(client) for client in clients]


def answer(clients: str) -> list[Event]:
    """An answer of each of these clients to the stage under way."""
    return [StageAnswered(client) for client in clients]


def full_graph(clients: str, threshold: int = 2, quorum: int = 2) -> GraphMade:
    """The graph in which everybody holds shares of everybody's secrets."""
    return GraphMade(Graph(dict.fromkeys(clients, frozenset(clients)), threshold, quorum, quorum))


def agreeing(clients: str = "abc", rounds: int = 3, **policy: Any) -> RoundState:
    """A run with secure aggregation that asks for the keys of all of `clients`, of which two are enough."""
    return collecting(clients, rounds, **{"secure": True, "quorum": 2, "min_accepted": 2, **policy})


def in_stages(clients: str, *, since: str = "abc", **policy: Any) -> dict[Phase, RoundState]:
    """The state at the begin of each stage after AGREEING; all answer before."""
    sharing = play(agreeing(since, **policy), *answer(since), full_graph(since))[0]
    masked = play(sharing, *answer(clients))[0]
    signing = play(masked, *arrive(clients))[0]
    return {
        Phase.SHARING: sharing, Phase.COLLECTING: masked, Phase.SIGNING: signing,
        Phase.OPENING: play(signing, *answer(clients[:2]))[0],
    }  # fmt: skip


def accepted(clients: str) -> tuple[tuple[str, bytes], ...]:
    """The accepted list of these clients, in the order given."""
    return tuple((client, client.encode()) for client in clients)


_HALF = play(collecting(rounds=1, quorum=2), *arrive("a"), *leave("c"))[0]
_STEPPING = play(_HALF, *arrive("b"))[0]
_STAGES = in_stages("abc", rounds=1)
SAMPLES = {
    Phase.AGREEING: play(agreeing(rounds=1), *answer("a"), *leave("c"))[0],
    Phase.TOSSING: play(agreeing(rounds=1, most_full=2), *answer("abc"), *answer("a"), *leave("c"))[0],
    Phase.SHARING: play(_STAGES[Phase.SHARING], *answer("a"), *leave("c"))[0],
    Phase.SIGNING: play(_STAGES[Phase.SIGNING], *answer("a"), *leave("c"))[0],
    Phase.OPENING: play(_STAGES[Phase.OPENING], *answer("a"), *leave("c"))[0],
    Phase.SELECTING: play(_HALF, *leave("b"))[0],
    Phase.COLLECTING: _HALF,
    Phase.REDUCING: play(collecting(exchanges=2), *arrive("abc"))[0],
    Phase.STEPPING: _STEPPING,
    Phase.COMMITTING: play(_STEPPING, StepComputed())[0],
    Phase.EVALUATING: play(_STEPPING, *COMMIT)[0],
    Phase.ENDED: play(_STEPPING, *COMMIT, Evaluated())[0],
}
"""A run of one round in each phase. Its cohort is a, b, c: a delivered or answered, b still works, c is out."""
