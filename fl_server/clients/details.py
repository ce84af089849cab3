"""One client as `fl clients show` has it: who speaks for it, what it works on, and what happened to it."""

from __future__ import annotations

from collections.abc import Sequence

from fl_server.clients.duels import Contest
from fl_server.coordinator import Coordinator
from fl_server.errors import NoSuchRun
from fl_server.fleet import Fleet
from fl_server.sessions import Origin
from fl_server.store.base import ClientRecord, HistoryRecord
from fl_server.views import client_status, history_entry, timestamp
from protos.fl.v1 import admin_pb2 as pb


def client_details(fleet: Fleet, record: ClientRecord, entries: Sequence[HistoryRecord]) -> pb.GetClientResponse:
    """The answer but for the work. entries: its history, oldest first."""
    client_id = record.client_id
    response = pb.GetClientResponse(
        client=client_status(fleet, record), history=[history_entry(entry) for entry in entries]
    )
    if (session := fleet.open_session(client_id)) is not None:
        response.session.CopyFrom(_origin(session.origin))
    if (contest := fleet.duels.contest_of(client_id)) is not None:
        _tell_of(contest, response)
    if (standing := fleet.quarantine.standing(client_id)) is not None:
        response.standing.CopyFrom(pb.Quarantine(refusals=standing.refusals, reason=standing.reason))
        if standing.until:
            response.standing.until.CopyFrom(timestamp(standing.until))
    return response


def work_of(coordinator: Coordinator, client_id: str, run_id: str) -> str:
    """What the client works on, in words; empty for nothing."""
    try:
        run = coordinator.run(run_id)
    except NoSuchRun:
        return ""
    given = "has an assignment" if client_id in run.state.outstanding else "is kept for it"
    return f"run {run_id}, round {run.state.round}, {run.state.phase.value}: {given}"


def _tell_of(contest: Contest, response: pb.GetClientResponse) -> None:
    response.conflicts, response.contested = contest.conflicts, contest.flapping
    if contest.refused is not None:
        response.refused.CopyFrom(_origin(contest.refused))
    if contest.fenced is not None:
        response.fenced.CopyFrom(_origin(contest.fenced))


def _origin(origin: Origin) -> pb.ClientOrigin:
    message = pb.ClientOrigin(
        address=origin.address,
        instance_id=origin.instance_id,
        registered=timestamp(origin.at),
        certificate_serial=origin.serial,
    )
    if origin.ends is not None:
        message.certificate_end.CopyFrom(timestamp(origin.ends))
    return message
