"""The stages of secure aggregation in the driver of the core: what it writes, whom it asks, and which answers it takes.

The content of a message is the list that it is made of, and an answer is a digest. What a device promises in the real
protocol is checked where the coordinator could make it break the promise: no draw has two cohorts, no stage two
messages, and no masked update is opened with another list than the one that its client has signed.
"""

from __future__ import annotations

from collections.abc import Iterator

from fl_common.secure_aggregation.plan import plan_of
from fl_common.secure_aggregation.terms import Settings
from fl_server.rounds import effects as fx
from fl_server.rounds.events import Accepted, Graph
from fl_server.rounds.sampling import RoundPolicy
from fl_server.rounds.state import BEFORE_MASKS, Phase, RoundState
from tests.deterministic.core_ledger import Asked, Ledger, Place, Stage, Told, digest

STAGE_S = 200.0
"""Time of a stage but for the masked updates."""


def graph_of(policy: RoundPolicy, members: tuple[str, ...]) -> Graph:
    """The graph of these members: all are neighbours, or each has two on each side of a circle."""
    plan = plan_of(Settings(), len(members))
    count, reach = len(members), 2 if len(members) > policy.most_full else len(members)
    near = {
        client: frozenset(members[(at + step) % count] for step in range(-reach, reach + 1))
        for at, client in enumerate(members)
    }
    threshold = 2 * min(len(holders) for holders in near.values()) // 3 + 1
    return Graph(near, threshold, plan.quorum, plan.fewest)


def under_way(ledger: Ledger, state: RoundState) -> Stage | None:
    """The last stage that was opened in the draw under way; None in the first."""
    stages = ledger.stages.get(state.round, [])
    return stages[-1] if stages else None


def open_stage(ledger: Ledger, told: Told, effect: fx.OpenStage) -> None:
    """Write a stage."""
    stage, stages = Stage(effect.stage, effect.members, effect.closed), ledger.stages.setdefault(effect.round, [])
    if stage.name not in [known.name for known in stages]:
        stages.append(stage)
    place = (effect.round, effect.attempt)
    if stage.name == Phase.SIGNING.value:
        first = told.lists.setdefault(place, stage.members)
        assert first == stage.members, f"one list of survivors is signed: {stage.members} after {first} in {place}"


def ask(ledger: Ledger, told: Told, state: RoundState, client: str) -> None:
    """Send a client the message of the stage under way, and its part of it."""
    if not state.policy.secure or client not in state.drawn or client in state.out:
        return
    place, stage = (state.round, state.attempt), under_way(ledger, state)
    if stage is None:
        cohort = ledger.attempts[state.round][-1][2]
        first = told.cohorts.setdefault(place, cohort)
        assert first == cohort, f"a draw has one cohort: {cohort} after {first} in {place}"
        stage = Stage(Phase.AGREEING.value, cohort, cohort)
    asked = Asked(*place, stage.name)
    known = told.messages.setdefault(asked, stage)
    assert known == stage, f"a stage has one message: {stage} after {known} in {place}"
    if state.phase is Phase.COLLECTING:
        told.masks[client] = (*place, stage.members)
    else:
        told.asked[client] = asked


def answered(ledger: Ledger, state: RoundState, asked: Asked, client: str) -> bool:
    """Write an answer to the stage under way. Returns whether it is one."""
    if not state.staged or asked != Asked(state.round, state.attempt, state.phase.value) or client not in state.drawn:
        return False
    ledger.answers.setdefault(asked, set()).add(client)
    return True


def update_of(state: RoundState, client: str, place: Place, epoch: int, model: bytes, attempt: int) -> bytes:
    """What a client makes of its work. With secure aggregation each draw has other batches."""
    return digest(client, *place, epoch, model, *((attempt,) if state.policy.secure else ()))


def check_opened(ledger: Ledger, told: Told, state: RoundState, accepted: Accepted) -> None:
    """Before a sum: its updates are those of the signed list, and those that opened shares are enough."""
    if not state.policy.secure:
        return
    clients, signed = tuple(client for client, _ in accepted), told.lists.get((state.round, state.attempt))
    assert clients == signed, f"a sum has the clients of its signed list: {clients}, not {signed}"
    stages = {stage.name: stage for stage in ledger.stages[state.round]}
    sharers = stages[Phase.COLLECTING.value].members
    openers = ledger.answers.get(Asked(state.round, state.attempt, Phase.OPENING.value), set())
    graph = graph_of(state.policy, stages[Phase.SHARING.value].members)
    closed = [client for client in sharers if len(graph.holders[client] & openers) < graph.threshold]
    assert not closed, f"enough clients open each mask: not that of {closed}, by {sorted(openers)}"


def forget(ledger: Ledger, round_: int, past_draws: int) -> None:
    """Remove the stages of a round that is drawn again, and keep how often it was drawn."""
    ledger.stages.pop(round_, None)
    for asked in [asked for asked in ledger.answers if asked.round == round_]:
        del ledger.answers[asked]
    if past_draws:
        ledger.attempts[round_] = [(0, past_draws - 1, ())]


def saved_stages(ledger: Ledger, state: RoundState, round_: int) -> dict[str, object]:
    """What `SavedRound` has of the stages."""
    attempts = ledger.attempts.get(round_, [])
    if not state.policy.secure or not attempts:
        return {}
    stages = ledger.stages.get(round_, [])
    asked = Asked(round_, attempts[-1][1], stages[-1].name if stages else Phase.AGREEING.value)
    shared = [stage.members for stage in stages if stage.name == Phase.SHARING.value]
    return {
        "stages": {stage.name: stage.members for stage in stages},
        "answered": frozenset(ledger.answers.get(asked, ())),
        "graph": graph_of(state.policy, shared[0]) if shared else None,
    }


def absent(effect: fx.OpenStage, told: Told) -> Iterator[str]:
    """The members of a stage that are away: the work that tells the core."""
    yield from (f"gone {client}" for client in effect.members if client not in told.present)


def trains(state: RoundState) -> bool:
    """Whether clients are sent assignments."""
    return state.phase is Phase.COLLECTING or (state.policy.secure and state.phase in BEFORE_MASKS)
