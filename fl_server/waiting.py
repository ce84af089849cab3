"""Why a run waits for clients, in words that say whom to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fl_server.run import Run

_SHOWN = len("sha256:") + 12
"""Characters of a source's digest that are enough to tell two apart."""


def why_waiting(run: Run, waiting: str) -> str:
    """`waiting`, and who is here with another version of the task's code and so cannot be drawn."""
    if differing := _differing(run):
        client, version, source = differing[0]
        expected_version, expected_source = run.behaviour.fingerprint
        waiting += (
            f"; {len(differing)} with another version of the task's code, first {client}: expected version "
            f"{expected_version!r} {expected_source[:_SHOWN]}, got {version!r} {source[:_SHOWN]}; install the same on "
            "both sides"
        )
    return waiting


def _differing(run: Run) -> list[tuple[str, str, str]]:
    """(client, version, source) of present clients that have the run's task by name, but not its code."""
    fleet, name = run.parts.fleet, run.config.task.name
    offers = ((client, offer) for client in fleet.present() for offer in fleet.record(client).tasks)
    found = [(client, offer["version"], offer["source"]) for client, offer in offers if offer["name"] == name]
    return [each for each in found if each[1:] != run.behaviour.fingerprint]
