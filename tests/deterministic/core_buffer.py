"""Runs with a buffer in lives of depth 1: their policy, what their ledger has, and what must hold.

A row of an update is kept under (version, 0). Times of their draws are not counted here: depth 2 has them.
"""

from __future__ import annotations

import random
from dataclasses import replace

from fl_server.rounds.by_client import BufferedUpdate, Work
from fl_server.rounds.restoring import SavedRound
from fl_server.rounds.sampling import RoundPolicy
from fl_server.rounds.state import Phase, RoundState
from tests.deterministic.core_ledger import Ledger, digest

REST, OF = 18, 22
"""A life whose seed has this rest has a buffer."""
Key = tuple[int, str]
"""(version, client)."""


def buffered(policy: RoundPolicy, draw: random.Random) -> RoundPolicy:
    """The policy with a buffer in place of what goes not with it."""
    goal = draw.choice((1, 2, 2, 3))
    return replace(
        policy, close="buffer", goal=goal, concurrency=draw.randint(1, 5), max_staleness=draw.randint(0, 3),
        sampling="fixed", min_clients=draw.randint(1, 4), quorum=0, min_accepted=1, exchanges=1, population=0,
        private=False, most_draws=0,
    )  # fmt: skip


def counted(ledger: Ledger) -> list[Key]:
    """The updates of all committed steps."""
    steps = [(ledger.fixed[step, 0], ledger.versions[step, 0]) for step in range(len(ledger.commits))]
    return [(version, client) for taken, of in steps for (client, _), version in zip(taken, of, strict=True)]


def waiting(ledger: Ledger) -> list[Key]:
    """The admitted updates that no committed step has, in the order of arrival; those of a fixed list come first."""
    done, place = {*counted(ledger), *ledger.given_up}, (len(ledger.commits), 0)
    taken = ledger.fixed.get(place, ())
    versions = ledger.versions.get(place, ()) if taken else ()
    first = [(version, client) for (client, _), version in zip(taken, versions, strict=True)]
    rows = [key for key in ledger.arrived if key[1] in ledger.updates.get((key[0], 0), {}) and key not in done]
    return [*(key for key in first if key not in done), *(key for key in rows if key not in first)]


def saved(ledger: Ledger, state: RoundState) -> SavedRound:
    """What the ledger has of the buffer and of the work of all clients. state: before the round under way."""
    round_, assigned = len(ledger.commits), dict[str, Work]()
    for version in range(max(0, round_ - state.policy.max_staleness), round_ + 1):
        for _, attempt, cohort in ledger.attempts.get(version, ()):
            assigned.update(dict.fromkeys(cohort, Work(version, attempt)))

    def decided(client: str, version: int) -> bool:
        return any(client in rows.get((version, 0), {}) for rows in (ledger.updates, ledger.refused))

    work = {client: one for client, one in assigned.items() if not decided(client, one.version)}
    return SavedRound(
        list(ledger.attempts.get(round_, [])),
        refused=dict(ledger.refused.get((round_, 0), {})),
        failed={c: failed for c, failed in ledger.failed.get((round_, 0), {}).items() if c in work},
        restarts={c: ledger.processes.get((one.version, 0), {}).get(c, 0) for c, one in work.items()},
        work=work,
        buffer=tuple(
            BufferedUpdate(client, version, ledger.updates[version, 0][client]) for version, client in waiting(ledger)
        ),
    )


def give_up(ledger: Ledger) -> None:
    """At the end of the run: what is left in the buffer will not count."""
    ledger.given_up.update(waiting(ledger))


def drop(ledger: Ledger, round_: int) -> None:
    """The round is redrawn: its version's updates are gone."""
    ledger.arrived = [key for key in ledger.arrived if key[0] != round_]
    ledger.given_up = {key for key in ledger.given_up if key[0] != round_}


def check_state(ledger: Ledger, state: RoundState) -> None:
    """After the effects of an event."""
    computing = zip(state.accepted, state.versions, strict=True) if state.computing else ()
    here = [*((version, client) for (client, _), version in computing), *((of, c) for c, of, _ in state.buffer)]
    if state.phase is not Phase.ENDED:
        rows = waiting(ledger)
        assert sorted(here) == sorted(rows), f"a buffer is as in the ledger: {here}, not {rows}"
    working = len(state.outstanding)
    assert working <= state.policy.concurrency, f"only free slots are filled: {working} work"


def check_restored(before: RoundState, after: RoundState) -> None:
    """A restart at rest keeps the buffer, with the list of the step under way at its beginning, and the work."""
    taken = tuple[BufferedUpdate, ...]()
    if before.computing:
        pairs = zip(before.accepted, before.versions, strict=True)
        taken = tuple(BufferedUpdate(client, version, made) for (client, made), version in pairs)
    now, was = after.buffer, (*taken, *before.buffer)
    assert now == was, f"a restart keeps the buffer: {now}, not {was}"
    kept = {client: (one.version, one.attempt) for client, one in after.work.items()}
    had = {client: (one.version, one.attempt) for client, one in before.work.items() if client not in before.refused}
    missing = {client: one for client, one in had.items() if kept.get(client) != one and not after.too_stale(one[0])}
    assert not missing, f"a restart keeps the work of each client: not {missing}"


def check_round(ledger: Ledger, policy: RoundPolicy, round_: int) -> None:
    """A committed step."""
    taken, versions = ledger.fixed[round_, 0], ledger.versions[round_, 0]
    assert len(taken) == policy.goal, f"a step has its goal: round {round_} counts {len(taken)}"
    for (client, made), version in zip(taken, versions, strict=True):
        stale = round_ - version
        assert 0 <= stale <= policy.max_staleness, f"no update is too stale: {client} is {stale} old in {round_}"
        asked = any(client in cohort for _, _, cohort in ledger.attempts.get(version, ()))
        row = ledger.updates.get((version, 0), {}).get(client)
        right = digest(client, version, 0, ledger.commits[round_][2], model_of(ledger, version))
        fits = asked and row == made == right
        assert fits, f"a step has admitted updates of their versions: not that of {client} in round {round_}"
    model = model_of_step(ledger, round_)
    assert ledger.commits[round_][0] == model, f"a model is that of its step: round {round_} has another"


def model_of(ledger: Ledger, version: int) -> bytes:
    """The model of a version."""
    return ledger.commits[version - 1][0] if version else b"first"


def model_of_step(ledger: Ledger, round_: int) -> bytes:
    """The model that follows from a step's list."""
    return digest(model_of(ledger, round_), ledger.fixed[round_, 0], ledger.versions[round_, 0])
