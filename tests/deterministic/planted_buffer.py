"""Planted faults of runs with a buffer, in the core and its driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fl_server.rounds import buffer, restoring
from fl_server.rounds.events import UpdateAdmitted
from fl_server.rounds.machine import BUFFERED_RULES
from fl_server.rounds.state import Phase, RoundState
from fl_server.rounds.state import replace as replace_state
from tests.deterministic import core_buffer, core_life
from tests.deterministic.core_driver import Driver
from tests.deterministic.core_stages import update_of

Patch = tuple[Any, Any, Any]


def _update_is_not_kept() -> Patch:
    def admit(state: RoundState, event: UpdateAdmitted) -> Any:
        after, effects = _ADMIT(state, event)
        return replace_state(after, buffer=after.buffer[:-1]), effects

    return BUFFERED_RULES, (Phase.COMMITTING, UpdateAdmitted), admit


def _lost_slots_are_given_out_twice() -> Patch:
    return restoring, "_with_slots", lambda state, clients: set(clients)


def _saved_without(**changes: Any) -> Callable[[], Patch]:
    return lambda: (core_buffer, "saved", lambda ledger, state: replace(_SAVED(ledger, state), **changes))


def _step_has_one_less() -> Patch:
    def step(state: RoundState) -> Any:
        after, effects = _STEP(replace_state(state, goal=max(1, state.goal - 1)))
        return replace_state(after, goal=state.goal), effects

    return buffer, "_step", step


def _nothing_is_too_stale() -> Patch:
    return RoundState, "too_stale", lambda state, version: False


def _another_model_is_trained() -> Patch:
    return core_life, "update_of", lambda state, client, *rest: _UPDATE_OF(state, client + "?", *rest)


def _another_step_is_computed() -> Patch:
    return Driver, "compute", lambda driver: b"another"


BUFFER: dict[str, Callable[[], Patch]] = {
    "an update that comes during a commit is not kept": _update_is_not_kept,
    "a restart gives the slots of lost clients out twice": _lost_slots_are_given_out_twice,
    "a restart forgets the buffer": _saved_without(buffer=()),
    "a restart forgets who works from earlier versions": _saved_without(work={}),
    "a step has an update less than its goal": _step_has_one_less,
    "an update counts however old its version is": _nothing_is_too_stale,
    "a client of a buffer trains another model": _another_model_is_trained,
    "a step is computed without its list": _another_step_is_computed,
}

_ADMIT, _STEP, _SAVED, _UPDATE_OF = buffer.admit, buffer._step, core_buffer.saved, update_of
