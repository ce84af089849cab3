"""Draws docs/round-states.md from the round state machine itself: `python -m docs.source.round_states` writes it anew.

RULES says which events a phase takes; where they lead is found by trying each of them in every state that a few small
runs can reach, so the page cannot say what the machine does not do.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fl_server import events as e
from fl_server.round_rule import UnexpectedEvent
from fl_server.round_state import Phase, RoundPolicy, RoundState
from fl_server.rounds import RULES, advance

PAGE = Path(__file__).parents[1] / "round-states.md"
Edge = tuple[Phase, str, Phase]

_RUNS = (
    RoundState(RoundPolicy(seed=0, clients_per_round=2, quorum=2), rounds=2),
    RoundState(RoundPolicy(seed=0, clients_per_round=2, exchanges=2, evaluate_every=0), rounds=2),
    RoundState(RoundPolicy(seed=0, min_clients=2, await_evaluation=True), rounds=2),
    RoundState(RoundPolicy(seed=0, ask_clients_every=1), rounds=1),
    # Picked up after a restart with all that was wanted.
    *(
        RoundState(
            RoundPolicy(seed=0, exchanges=exchanges),
            rounds=1,
            phase=Phase.COLLECTING,
            goal=1,
            drawn=frozenset("a"),
            admitted=(("a", b""),),
        )
        for exchanges in (1, 2)
    ),
    # Picked up with a list that was fixed, and bytes that are gone.
    RoundState(
        RoundPolicy(seed=0),
        rounds=1,
        phase=Phase.COLLECTING,
        goal=1,
        drawn=frozenset("a"),
        out=frozenset("a"),
        fixed=(("a", b""),),
    ),
)
_EVENTS: tuple[e.Event, ...] = (
    *(e.RosterChanged(clients, settled=True) for clients in ((), ("a", "b"), ("a", "b", "c"))),
    *(kind(client) for kind in (e.ClientOut, e.ClientBack) for client in "abc"),
    *(e.UpdateAdmitted(client, b"") for client in "abc"),
    *(
        kind()
        for kind in (e.DeadlinePassed, e.PickedUp, e.RetryDue, e.ExchangeReduced, e.Stepped, e.Committed, e.Evaluated)
    ),
    *(e.Evaluated("clients"), e.StatesLost(""), e.PauseRequested(), e.ResumeRequested(), e.Extended(3)),
    e.CulpritsFound((("a", ""),)),
    *(e.EndRequested("completed", ""), e.EndRequested("failed", "")),
)
_LAST_ATTEMPT = 2
"""Attempts are without end; nothing new happens after a few."""

_INTRO = """# The states of a round

Made by `python -m docs.source.round_states` from `fl_server/rounds.py`; a test compares.
The commands that go with each transition, and the reasons, are in that file.

Events that leave the phase as it is are not drawn; the table below has all of them.
"""


@cache
def transitions() -> frozenset[Edge]:
    """Every (phase, event, next phase) that the small runs can reach, including those that stay in their phase."""
    edges: set[Edge] = set()
    seen, front = set(_RUNS), list(_RUNS)
    while front:
        state = front.pop()
        for event, after in _steps(state):
            edges.add((state.phase, type(event).__name__, after.phase))
            if after not in seen and after.attempt <= _LAST_ATTEMPT:
                seen.add(after)
                front.append(after)
    return frozenset(edges)


def _steps(state: RoundState) -> Iterator[tuple[e.Event, RoundState]]:
    for event in _EVENTS:
        try:
            yield event, advance(state, event)[0]
        except UnexpectedEvent:
            continue


def page() -> str:
    """The whole page: a mermaid diagram of the moves, and a table of phase by event."""
    edges = transitions()
    return f"{_INTRO}\n```mermaid\n{_diagram(edges)}\n```\n\n{_table(edges)}\n"


def _diagram(edges: frozenset[Edge]) -> str:
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.SELECTING.value}"]
    for before in Phase:
        for after in Phase:
            names = sorted(name for start, name, end in edges if (start, end) == (before, after))
            if names and before is not after:
                lines.append(f"    {before.value} --> {after.value} : {', '.join(names)}")
    return "\n".join([*lines, f"    {Phase.ENDED.value} --> [*]"])


def _table(edges: frozenset[Edge]) -> str:
    rows = ["| phase | event | leads to |", "|---|---|---|"]
    for phase in Phase:
        for name in sorted(kind.__name__ for start, kind in RULES if start is phase):
            ends = [after.value for after in Phase if (phase, name, after) in edges]
            rows.append(f"| {phase.value} | {name} | {', '.join(ends)} |")
    return "\n".join([*rows, "", "Every other event is refused in that phase, and changes nothing."])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
