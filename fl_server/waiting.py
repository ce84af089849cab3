"""Why a run waits for clients, in words that say whom to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from fl_server.registration import fits
from protos.fl.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    from fl_server.run import Run

_SHOWN = len("sha256:") + 12
"""Characters of a source's digest that are enough to tell two apart."""


def why_waiting(run: Run, waiting: str) -> str:
    """`waiting`, and who is here and cannot be drawn.

    In quarantine, closed by their owners' gates, or with another version of the task's code.
    """
    if quarantined := _quarantined(run):
        client, left = quarantined[0], run.parts.fleet.quarantine.seconds_left(quarantined[0])
        waiting += (
            f"; {len(quarantined)} in quarantine, first {client}, for {left:.0f} s more: `fl clients list` says why, "
            f"`fl clients release {client}` ends it"
        )
    if left_out := _left_out(run):
        waiting += (
            f"; {len(left_out)} left out for lost client states, first {left_out[0]}: `fl clients release "
            f"{left_out[0]}` lets it back"
        )
    if resting := _resting(run):
        waiting += _told_of_resting(resting)
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


def _left_out(run: Run) -> list[str]:
    """Present clients that the run draws no more."""
    here = set(run.parts.fleet.present())
    return sorted(client for client in run.client_states.left_out if client in here)


def _resting(run: Run) -> dict[str, pb.Availability]:
    """What those say of themselves who are present and could be drawn for the run, but may not train now."""
    fleet = run.parts.fleet
    said = {client: fleet.workforce.availability(client) for client in fleet.present()}
    return {
        client: word
        for client, word in said.items()
        if not word.may_train and fits(fleet.record(client), run.task, run.config.labels)
    }


def _told_of_resting(resting: Mapping[str, pb.Availability]) -> str:
    reasons = Counter(reason_of(word) for word in resting.values())
    counts = ", ".join(f"{reasons[reason]} {reason}" for reason in sorted(reasons))
    client, word = next(iter(resting.items()))
    told = f"; {len(resting)} may not train by their own word ({counts}), first {client}: {word.detail}"
    untils = [word.until.seconds for word in resting.values() if word.HasField("until")]
    if untils:
        told += f"; the first may again at {datetime.fromtimestamp(min(untils), UTC):%Y-%m-%d %H:%M:%S} UTC"
    return told


def reason_of(word: pb.Availability) -> str:
    """Why a client may not train, as a word or two; a newer client's reason is "other"."""
    known = pb.UnavailableReason.values()
    name = pb.UnavailableReason.Name(word.reason) if word.reason in known else ""
    return name.removeprefix("UNAVAILABLE_REASON_").replace("_", " ").lower().replace("unspecified", "") or "other"


def _differing(run: Run) -> list[tuple[str, str, str]]:
    """(client, version, source) of present clients that have the run's task by name, but not its code."""
    fleet, name = run.parts.fleet, run.config.task.name
    offers = ((client, offer) for client in fleet.present() for offer in fleet.record(client).tasks)
    found = [(client, offer["version"], offer["source"]) for client, offer in offers if offer["name"] == name]
    return [each for each in found if each[1:] != run.behaviour.fingerprint]
