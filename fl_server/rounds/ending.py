"""Rules for the end of a run: by an operator, an error, its time, or a fault of its own.

The faults of several clients are one fault of the run: then it fails, in place of asking for ever. Each of these rules
looks at the exchange under way alone, and one client never fails a run by itself where others can be drawn: the cause
may be its own data.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from fl_server.rounds.by_client import ByClient
from fl_server.rounds.effects import Cancel, Effect, EndRun
from fl_server.rounds.events import EndRequested, EndStatus, ModelDiverged, TimeUsed, counted
from fl_server.rounds.sampling import by_id
from fl_server.rounds.state import Phase, Result, RoundState, replace

SAME_FAILURE = 3
"""Different clients that must have failed with the same cause in one round."""
LAST_SAME_FAILURE = 2
"""The same where no other client is left to draw."""

RunFault = tuple[Literal["not_finite", "norm", "layout", "task"], str]
"""(`RoundState.failed_by`, the reason of the end in words)."""


def cancel(state: RoundState) -> tuple[Effect, ...]:
    """The effect that cancels the outstanding clients, if there are any."""
    return cancelled(state, by_id(state.outstanding)) if state.working else ()


def cancelled(state: RoundState, clients: tuple[str, ...]) -> tuple[Effect, ...]:
    """The effect that cancels the work of some clients, if there are any."""
    rounds = tuple(state.work[client].version for client in clients) if state.policy.buffered else ()
    return (Cancel(clients, state.exchange, rounds),) if clients else ()


def end(state: RoundState, event: EndRequested) -> Result:
    """End the run: at once, or after the commit of a model that is being computed."""
    if state.phase is Phase.STEPPING and event.status != "failed":
        return _end_after_commit(state, event)
    if state.phase is Phase.COMMITTING and not event.broken:  # the model may be durable already
        return _end_after_commit(state, event)
    return end_now(state, event)


def end_now(state: RoundState, event: EndRequested) -> Result:
    """End the run at once, and give up the current round."""
    ending = (event.status, event.reason)
    return ended(state, ending), (*cancel(state), EndRun(*ending))


def ended(state: RoundState, ending: tuple[EndStatus, str]) -> RoundState:
    """The state after the end, in which no client works. Updates in a buffer do not count any more."""
    state = replace(state, phase=Phase.ENDED, ending=ending, out=state.out | state.outstanding)
    if not state.policy.buffered:
        return state
    return replace(state, drawn=frozenset(), out=frozenset(), work=ByClient(), buffer=())


def end_by_fault(state: RoundState, fault: RunFault) -> Result:
    """The run fails by a fault of its own."""
    failed_by, why = fault
    return end_now(replace(state, failed_by=failed_by), EndRequested("failed", why))


def _end_after_commit(state: RoundState, event: EndRequested) -> Result:
    return replace(state, ending=(event.status, event.reason)), ()


def time_used(state: RoundState, event: TimeUsed) -> Result:
    """End the run at its limit of time."""
    state = replace(state, elapsed_s=event.seconds)
    if not state.wall_time_s or state.elapsed_s < state.wall_time_s or state.ending is not None:
        return state, ()
    return end(state, EndRequested("completed", f"its {state.wall_time_s:g} s are over"))


def diverged(state: RoundState, event: ModelDiverged) -> Result:
    """The run fails: its last committed model stays."""
    return end_now(replace(state, failed_by="not_finite"), EndRequested("failed", event.why))


def _model(round: int) -> str:
    return f"the model of round {round}" if round >= 0 else "the first model"


def _without_finite_values(state: RoundState) -> dict[str, str]:
    """Clients that got a NaN or an infinity, with the reason."""
    failed = {client: failure.why for client, failure in state.failed.items() if failure.not_finite}
    return failed | {client: refusal.why for client, refusal in state.refused.items() if refusal.fault == "not_finite"}


def _refused_for(state: RoundState, fault: str) -> dict[str, str]:
    return {client: refusal.why for client, refusal in state.refused.items() if refusal.fault == fault}


def _several(state: RoundState) -> int:
    return max(2, state.goal)


def training_diverges(state: RoundState) -> RunFault | None:
    """Enough clients got values that are not finite, and no other update is there."""
    if state.collected or len(state.failed) + len(state.refused) < _several(state):
        return None
    without = _without_finite_values(state)
    return _diverged(state, without) if len(without) >= _several(state) else None


def _diverged(state: RoundState, without: dict[str, str]) -> RunFault:
    client, why = min(without.items())
    return "not_finite", (
        f"{counted(len(without), 'client')} got values that are not finite in round {state.round}, and no client got "
        f"others; {_model(state.round - 1)} stays. {client}: {why}. Lower the learning rate, or change what makes "
        "such values"
    )


def no_client_delivers(state: RoundState) -> RunFault | None:
    """All clients that were drawn have one fault, no update is there, and no other client is left to draw."""
    if state.collected or not state.drawn:
        return None
    without, norms, layouts = _without_finite_values(state), _refused_for(state, "norm"), _refused_for(state, "layout")
    if state.drawn <= without.keys():
        return _diverged(state, without)
    if len(norms) + len(without) >= _several(state) and state.drawn <= norms.keys() | without.keys():
        return _all_too_long(state, norms | without)
    # One client alone proves nothing about the model, unless no round was committed yet and no other is here.
    alike = len({why.partition(", got ")[0] for why in layouts.values()}) == 1
    alone = not state.round and layouts.keys() >= set(state.candidates)
    if alike and (alone or len(layouts) >= _several(state)) and state.drawn <= layouts.keys():
        return _other_layout(state, layouts)
    return None


def _all_too_long(state: RoundState, refused: dict[str, str]) -> RunFault:
    client, why = min(refused.items())
    return "norm", (
        f"all updates of round {state.round}, from {counted(len(refused), 'client')}, had larger norms than the run "
        "allows; "
        f"{_model(state.round - 1)} stays. {client}: {why}. If such norms are right, create a run with another "
        "round.max_relative_norm or max_relative_payload; else lower the learning rate"
    )


def _other_layout(state: RoundState, layouts: dict[str, str]) -> RunFault:
    client, why = min(layouts.items())
    return "layout", (
        f"every update of round {state.round} was refused for its layout; {_model(state.round - 1)} stays. {client}: "
        f"{why}. What must change is no part of the model: keep it in a buffer with persistent=False"
    )


def same_failure(state: RoundState, again: frozenset[str] = frozenset()) -> RunFault | None:
    """The task's code fails everywhere, at the end of an attempt below the quorum.

    Enough different clients failed with one cause in this round, and more than those that delivered.
    again: clients of the cohort that may be drawn once more.
    """
    counts = Counter(failed.cause for failed in state.failed.values() if failed.cause)
    if not counts:
        return None
    cause = min(counts, key=lambda cause: (-counts[cause], cause))
    left = not state.settled or set(state.candidates) - (state.drawn - again)
    if counts[cause] < (SAME_FAILURE if left else LAST_SAME_FAILURE) or counts[cause] <= state.collected:
        return None
    first = min((client for client, failed in state.failed.items() if failed.cause == cause), key=str.encode)
    return "task", (
        f"{counted(counts[cause], 'client')} failed in round {state.round} with the same error in the task's code, and"
        f" {state.collected} delivered; first {first}: {state.failed[first].why}. Correct the code and its"
        " fingerprint on both sides, or the devices' data, and resume the run"
    )
