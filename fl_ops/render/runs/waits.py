"""What a run waits for: clients of the current phase with the time left, or what a waiting run lacks."""

from __future__ import annotations

from fl_common import units
from fl_ops.render.states import first_of
from protos.fl.v1 import admin_pb2


def awaited(run: admin_pb2.RunStatus, since: float = 0.0) -> str:
    """The awaited clients and their deadline: edge-3 and 4 more, for at most 4 min 12 s more.

    since: seconds since the status was received. Empty if nothing is awaited.
    """
    if not run.awaited_count:
        return ""
    names = first_of(run.awaited, run.awaited_count) if run.awaited else f"{run.awaited_count} clients"
    return f"{names}{_left(run, since)}"


def current(run: admin_pb2.RunStatus) -> str:
    """The current phase in some words: collecting 1/2, 4 min 12 s left."""
    if not run.phase:
        return ""
    counts = f" {run.admitted}/{run.admitted + run.awaited_count}" if run.phase == "collecting" else ""
    left = f", {_duration_left(run, 0.0)} left" if run.awaited_count and run.HasField("deadline_left_s") else ""
    return f"{run.phase}{counts}{left}"


def line(run: admin_pb2.RunStatus, since: float = 0.0) -> str:
    """One line: what a waiting run lacks, or who is awaited in which phase; empty if nothing is."""
    if run.waiting_for:
        return f"waiting for {run.waiting_for}"
    clients = awaited(run, since)
    return f"{run.phase}: waiting for {clients}" if clients else ""


def _left(run: admin_pb2.RunStatus, since: float) -> str:
    return f", for at most {_duration_left(run, since)}" if run.HasField("deadline_left_s") else ""


def _duration_left(run: admin_pb2.RunStatus, since: float) -> str:
    return units.duration(round(max(0.0, run.deadline_left_s - since)))
