"""One client for `fl clients show`: its session, identity conflicts, work and history."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fl_server.clients.contested_identities import Contest
from fl_server.clients.fleet import Fleet
from fl_server.clients.sessions import Origin
from fl_server.errors import NoSuchRun
from fl_server.rpc.views import client_status, history_entry, timestamp
from fl_server.run.run import Run
from fl_server.runs.coordinator import Coordinator
from fl_server.store.records import ClientRecord, HistoryRecord
from protos.fl.v1 import admin_pb2 as pb

Numbered = tuple[int, HistoryRecord]


def client_details(fleet: Fleet, record: ClientRecord, entries: Sequence[Numbered]) -> pb.GetClientResponse:
    """The response without the client's work. entries: its history with numbers, oldest first."""
    client_id = record.client_id
    response = pb.GetClientResponse(
        client=client_status(fleet, record), history=[history_entry(*entry) for entry in entries]
    )
    if (session := fleet.sessions.of(client_id)) is not None:
        response.session.CopyFrom(_origin(session.origin))
    if (contest := fleet.contested.contest_of(client_id)) is not None:
        _add_contest(contest, response)
    if (refusals := fleet.quarantine.refusals_of(client_id)) is not None:
        response.standing.CopyFrom(pb.Quarantine(refusals=refusals.refusals, reason=refusals.reason))
        if refusals.until:
            response.standing.until.CopyFrom(timestamp(refusals.until))
    return response


def work_of(coordinator: Coordinator, client_id: str, run_id: str) -> str:
    """The client's current work, in words; empty without work."""
    try:
        run = coordinator.run(run_id)
    except NoSuchRun:
        return ""
    work = "has an assignment" if run.state.works(client_id) else "is reserved for it"
    return f"run {run_id}, round {run.state.round}, {run.state.phase.value}: {work}"


def not_drawn(runs: Iterable[Run], client_id: str) -> list[pb.NotDrawn]:
    """Why some runs do not draw the client; one that has ended, or may draw it or has, is left out."""
    open_runs = (run for run in runs if not run.ended and not run.state.works(client_id))
    reasons = ((run.id, run.eligible.why_not(run.state, client_id)) for run in open_runs)
    return [pb.NotDrawn(run_id=run_id, **why._asdict()) for run_id, why in reasons if why is not None]


def _add_contest(contest: Contest, response: pb.GetClientResponse) -> None:
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
