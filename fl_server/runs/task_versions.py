"""Clients that have another version of a run's task or method, or other frozen parameters, than the coordinator."""

from __future__ import annotations

import structlog

from fl_server.run.run import Run
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()


def notify_of_other_version(run: Run, client_id: str) -> None:
    """A client with other code of the run's task or method, or other frozen parameters, is never drawn: notify it."""
    _notify_of_other_method(run, client_id)
    name, (version, source) = run.config.task.name, run.context.fingerprint
    for offer in run.context.fleet.record(client_id).tasks:
        if offer["name"] != name:
            continue
        text = ""
        if (offer["version"], offer["source"]) != (version, source):
            text = (
                f"run {run.id!r} needs task {name!r} in version {version!r} ({source[:15]}), this client has "
                f"{offer['version']!r} ({offer['source'][:15]}): install the coordinator's version of the task"
            )
        elif offer.get("frozen") != (frozen := run.task.get("frozen", offer.get("frozen"))):
            text = (
                f"run {run.id!r} needs task {name!r} with the frozen parameters {frozen}, this client has "
                f"{offer.get('frozen', 'none')}: put the coordinator's files of them on this device, and restart it"
            )
        if text:
            log.warning("task_differs", run=run.id, client=client_id, why=text)
            run.context.fleet.push(client_id, pb.AttendResponse(notice=pb.Notice(text=text)))


def _notify_of_other_method(run: Run, client_id: str) -> None:
    """A client without the method is silent about it: it may be for other runs."""
    wanted = run.context.method
    for offer in run.context.fleet.record(client_id).methods if wanted else ():
        if offer["name"] == wanted["name"] and offer != wanted:
            text = (
                f"run {run.id!r} needs algorithm {wanted['name']!r} in version {wanted['version']!r}"
                f" ({wanted['source'][:15]}), this client has {offer['version']!r} ({offer['source'][:15]}): install"
                " the coordinator's version of the algorithm"
            )
            log.warning("method_differs", run=run.id, client=client_id, why=text)
            run.context.fleet.push(client_id, pb.AttendResponse(notice=pb.Notice(text=text)))
