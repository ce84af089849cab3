"""States of runs and clients as words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fl_ops import units
from protos.fl.v1 import admin_pb2, coordinator_pb2


def state_name(enum: Any, value: int) -> str:
    """An enum's value as a word: RUN_STATE_RUNNING is "running". A newer server's value is its number."""
    described = enum.DESCRIPTOR.values_by_number.get(value)
    prefix = enum.DESCRIPTOR.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return described.name.removeprefix(prefix).lower() if described else str(value)


def run_state(run: admin_pb2.RunStatus) -> str:
    """A run's state as a word. One that its coordinator could not load has none."""
    if run.state == admin_pb2.RUN_STATE_UNSPECIFIED:
        return "not loaded"
    return state_name(admin_pb2.RunState, run.state)


def client_state(client: admin_pb2.ClientStatus) -> str:
    """What matters most about a client, as a word or two."""
    if client.banned:
        return "banned"
    state = state_name(admin_pb2.ClientState, client.state)
    if client.HasField("quarantine"):
        state += f", quarantined until {units.moment(client.quarantine.until)}"
    if client.draining:
        state += ", draining"
    if client.HasField("availability") and not client.availability.may_train:
        state += f", {_resting(client.availability)}"
    return state


def _resting(said: coordinator_pb2.Availability) -> str:
    """may not train until 2026-03-01 06:00:00 (time window)."""
    until = f" until {units.moment(said.until)}" if said.HasField("until") else ""
    why = state_name(coordinator_pb2.UnavailableReason, said.reason).replace("_", " ") if said.reason else ""
    return f"may not train{until}" + (f" ({why})" if why else "")


def member_rows(run: admin_pb2.RunStatus) -> list[tuple[str, str]]:
    """Clients whose states are missing from a run, and clients that it leaves out, in words that say what to do."""
    states = run.states
    missing, left_out = _first(states.first_missing, states.missing), _first(states.first_left_out, states.left_out)
    rows = []
    if states.missing:
        words = (
            f"{states.missing} of {states.members}: {missing}; their states keep the model from its optimum: if they "
            f"do not come back, `fl clients forget {states.first_missing[0]}` begins the states anew"
        )
        rows.append(("missing members", words))
    if states.left_out:
        back = f"`fl clients release {states.first_left_out[0]}` lets it back"
        rows.append(("left out", f"{left_out}, for lost client states: {back}"))
    return rows


def _first(names: Sequence[str], count: int) -> str:
    return ", ".join(names) + (f" and {count - len(names)} more" if count > len(names) else "")
