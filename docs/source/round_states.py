"""Writes docs/development/round-states.md from the round state machine: `python -m docs.source.round_states`.

RULES has the events that each phase accepts. Where they lead is found by applying each event in every state that a few
small runs can reach, so the page shows what the machine does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

from fl_server.rounds import events as e
from fl_server.rounds.by_client import ByClient
from fl_server.rounds.events import Graph
from fl_server.rounds.machine import advance
from fl_server.rounds.sampling import RoundPolicy
from fl_server.rounds.state import Phase, RoundState, UnexpectedEvent

PAGE = Path(__file__).parents[1] / "development/round-states.md"
Edge = tuple[Phase, str, Phase]

_SECURE: tuple[tuple[int, Literal["repeat", "end"]], ...] = ((2, "repeat"), (1, "end"))
"""The largest full graph, and what follows a drop-out."""
_RUNS = (
    RoundState(RoundPolicy(seed=0, clients_per_round=2, quorum=2, most_processes=1), rounds=1),
    RoundState(RoundPolicy(seed=0, clients_per_round=2, exchanges=2, evaluate_every=0), rounds=1),
    RoundState(RoundPolicy(seed=0, min_clients=2, await_evaluation=True), rounds=1),
    RoundState(RoundPolicy(seed=0, ask_clients_every=1), rounds=1),
    # With secure aggregation, for which two clients are enough here, and with coins.
    *(
        RoundState(
            RoundPolicy(
                seed=0,
                clients_per_round=2,
                min_accepted=2,
                secure=True,
                on_drop=on_drop,
                most_full=most,
                evaluate_every=0,
            ),
            rounds=1,
        )
        for most, on_drop in _SECURE
    ),
    # Restored after a restart with all updates that it needs.
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
    # Restored with a fixed list and lost bytes.
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
_GRAPH = Graph(dict.fromkeys("ab", frozenset("ab")), threshold=2, quorum=2, fewest=2)
_EVENTS: tuple[e.Event, ...] = (
    *(e.RosterChanged(clients, settled=True) for clients in ((), ("a", "b"))),
    *(kind(client) for kind in (e.ClientDroppedOut, e.ClientReturned) for client in "ab"),
    *(e.UpdateAdmitted(((client, b""),)) for client in "ab"),
    *(
        e.UpdateRefused("a", "norm", ""),
        e.WorkFailed("a"),
        e.StateLost("a", ""),
        e.ClientRestarted("a"),
        e.ClientReleased("a"),
        e.ModelDiverged(""),
        e.TimeUsed(1.0),
    ),
    *(
        kind()
        for kind in (
            e.DeadlinePassed,
            e.RoundRestored,
            e.RetryDue,
            e.ExchangeReduced,
            e.StepComputed,
            e.ModelCommitted,
            e.Evaluated,
        )
    ),
    *(e.StageAnswered(client) for client in "ab"),
    *(e.GraphMade(_GRAPH), e.RoundSpoiled("")),
    *(e.Evaluated("clients"), e.StatesLost(""), e.PauseRequested(), e.ResumeRequested(), e.Extended(3)),
    e.CulpritsFound((("a", ""),)),
    *(e.EndRequested("completed", ""), e.EndRequested("failed", "")),
)
_LIKE_A_DROP_OUT = (e.UpdateRefused, e.WorkFailed)
"""Events that lead where ClientDroppedOut does."""
_LAST_ATTEMPT = 1
"""Attempts never end; later ones add no transition."""

_INTRO = """# The states of a round

`python -m docs.source.round_states` generates this page from `fl_server/rounds/machine.py`; a test compares them.
The functions of its rules contain the effects of each transition and their reasons.

The diagram has the events that change the phase, the table those after which a phase lasts.

In a run with a buffer clients deliver, fail and return in all phases of an open run: `BUFFERED_RULES`.
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
            if after not in seen and after.attempt <= _LAST_ATTEMPT and not isinstance(event, _LIKE_A_DROP_OUT):
                seen.add(after)
                front.append(after)
    return frozenset(edges)


def _steps(state: RoundState) -> Iterator[tuple[e.Event, RoundState]]:
    for event in _EVENTS:
        try:
            after = advance(state, event)[0]
        except UnexpectedEvent:
            continue
        yield event, after if after is state else _without_what_only_grows(after)


def _without_what_only_grows(state: RoundState) -> RoundState:
    """It adds no transition."""
    return replace(state, state_epoch=0, epoch_rounds=0, judged_from=0, elapsed_s=0.0, restarts=ByClient())


def page() -> str:
    """Return the whole page: a mermaid diagram of the transitions, and a table of the events that keep a phase."""
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
    kept = {phase: sorted({name for before, name, after in edges if before is after is phase}) for phase in Phase}
    everywhere = set.intersection(*map(set, kept.values()))
    rows = ["| phase | events after which it may last |", "|---|---|"]
    rows += [f"| every phase | {', '.join(sorted(everywhere))} |"]
    rows += [
        f"| {phase.value} | {', '.join(name for name in names if name not in everywhere)} |"
        for phase, names in kept.items()
        if set(names) - everywhere
    ]
    return "\n".join([*rows, "", "Every other event is refused in that phase and changes nothing."])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
