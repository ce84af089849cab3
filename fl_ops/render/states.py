"""States of runs and clients as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fl_common import units
from protos.fl.v1 import admin_pb2, coordinator_pb2


def state_name(enum: Any, value: int) -> str:
    """The name of an enum's value: "running" for RUN_STATE_RUNNING; the number for a value that is not known here."""
    described = enum.DESCRIPTOR.values_by_number.get(value)
    prefix = enum.DESCRIPTOR.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return described.name.removeprefix(prefix).lower() if described else str(value)


def run_state(run: admin_pb2.RunStatus) -> str:
    """A run's state. It is "not loaded" if the coordinator could not load the run."""
    if run.state == admin_pb2.RUN_STATE_UNSPECIFIED:
        return "not loaded"
    return state_name(admin_pb2.RunState, run.state)


def client_state(client: admin_pb2.ClientStatus) -> str:
    """A client's state, with what keeps it from work."""
    if client.banned:
        return "banned"
    state = state_name(admin_pb2.ClientState, client.state)
    if client.HasField("quarantine"):
        state += f", quarantined until {units.moment(client.quarantine.until)}"
    if client.draining:
        state += ", draining"
    if client.HasField("availability") and not client.availability.may_train:
        state += f", {_unavailable(client.availability)}"
    return state


def _unavailable(availability: coordinator_pb2.Availability) -> str:
    """For example: may not train until 2026-03-01 06:00:00 (time window)."""
    until = f" until {units.moment(availability.until)}" if availability.HasField("until") else ""
    why = (
        state_name(coordinator_pb2.UnavailableReason, availability.reason).replace("_", " ")
        if availability.reason
        else ""
    )
    return f"may not train{until}" + (f" ({why})" if why else "")


def member_rows(run: admin_pb2.RunStatus) -> list[tuple[str, str]]:
    """Members with missing client states and clients that a run leaves out, with what to do about them."""
    states = run.states
    missing, left_out = first_of(states.first_missing, states.missing), first_of(states.first_left_out, states.left_out)
    rows = []
    if states.missing:
        text = (
            f"{states.missing} of {states.members}: {missing}; without their states the model misses its optimum; "
            f"if they do not return, `fl clients forget {states.first_missing[0]}` restarts the states"
        )
        rows.append(("missing members", text))
    if states.left_out:
        remedy = f"`fl clients release {states.first_left_out[0]}` admits it again"
        rows.append(("left out", f"{left_out}, for lost client states: {remedy}"))
    return rows


def shares_row(run: admin_pb2.RunStatus) -> str:
    """Clients with too few counted updates, with what to do about them."""
    if not run.below_due:
        return ""
    each = [f"{one.client_id} ({one.counted} counted, {one.due:.1f} due)" for one in run.first_below_due]
    return f"{first_of(each, run.below_due)}; the model learns little of their data"


def policy_row(run: admin_pb2.RunStatus) -> str:
    """The clients that refuse a run by the policy of their site: 3 clients refuse this run by policy: tasks (3)."""
    count = sum(run.policy_refusals.values())
    if not count:
        return ""
    rules = ", ".join(f"{rule} ({run.policy_refusals[rule]})" for rule in sorted(run.policy_refusals))
    who = "1 client refuses" if count == 1 else f"{count} clients refuse"
    return f"{who} this run by policy: {rules}"


def latest_failure(run: admin_pb2.RunStatus) -> str:
    """The latest work that failed on a client: 3 clients in round 2, the latest edge: KeyError: 'age' (...)."""
    failed = run.latest_failure
    if not run.HasField("latest_failure"):
        return ""
    clients = "1 client" if failed.clients == 1 else f"{failed.clients} clients"
    return f"{clients} in round {failed.round}, the latest {failed.client_id}: {failed.message}"


def refused_runs(client: admin_pb2.ClientStatus) -> str:
    """The runs that a client refuses by the policy of its site, with the reasons."""
    return "; ".join(f"{run_id}, by policy: {why}" for run_id, why in sorted(client.policy_refusals.items()))


def client_labels(client: admin_pb2.ClientStatus, marks: Mapping[bool, str]) -> str:
    """The labels of a client: site=north ward=a. marks: what follows a label that enrollment set, and a claimed one."""
    enrolled = set(client.enrolled_labels)
    return " ".join(f"{name}={client.labels[name]}{marks[name in enrolled]}" for name in sorted(client.labels))


def first_of(names: Sequence[str], count: int) -> str:
    """The first of `count` names: a, b and 3 more."""
    return ", ".join(names) + (f" and {count - len(names)} more" if count > len(names) else "")
