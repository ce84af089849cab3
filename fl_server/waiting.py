"""Why a run waits for clients, in words that say whom to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_server.registration import fits

if TYPE_CHECKING:
    from fl_server.run import Run

_SHOWN = len("sha256:") + 12
"""Characters of a source's digest that are enough to tell two apart."""


def why_waiting(run: Run, waiting: str) -> str:
    """`waiting`, and who is here and cannot be drawn: in quarantine, or with another version of the task's code."""
    if quarantined := _quarantined(run):
        client, left = quarantined[0], run.parts.fleet.quarantine.seconds_left(quarantined[0])
        waiting += (
            f"; {len(quarantined)} in quarantine, first {client}, for {left:.0f} s more: `fl clients list` says why, "
            f"`fl clients release {client}` ends it"
        )
    if differing := _differing(run):
        client, version, source = differing[0]
        expected_version, expected_source = run.behaviour.fingerprint
        waiting += (
            f"; {len(differing)} with another version of the task's code, first {client}: expected version "
            f"{expected_version!r} {expected_source[:_SHOWN]}, got {version!r} {source[:_SHOWN]}; install the same on "
            "both sides"
        )
    return waiting


def _quarantined(run: Run) -> list[str]:
    """Present clients that could be drawn for the run but for their quarantine."""
    fleet = run.parts.fleet
    here = (client for client in fleet.quarantine.clients() if client in fleet.present())
    return sorted(client for client in here if fits(fleet.record(client), run.task, run.config.labels))


def _differing(run: Run) -> list[tuple[str, str, str]]:
    """(client, version, source) of present clients that have the run's task by name, but not its code."""
    fleet, name = run.parts.fleet, run.config.task.name
    offers = ((client, offer) for client in fleet.present() for offer in fleet.record(client).tasks)
    found = [(client, offer["version"], offer["source"]) for client, offer in offers if offer["name"] == name]
    return [each for each in found if each[1:] != run.behaviour.fingerprint]
