"""What became of a client's work, and why it needs attention, in words."""

from __future__ import annotations

from fl_common import units
from fl_common.units import NOTHING
from fl_web.facts.words import Fact, Part, counts, fact
from protos.fl.v1 import admin_pb2 as pb

ENDS = ("admitted", "refused", "failed", "lost")
"""How an assignment ends by its client."""


def failed(work: pb.ClientWork) -> str:
    """Failed assignments of all, with their share: 47 of 114 (41 %). A dash without any assignment."""
    return _share(work.failed, work.assignments)


def came_last(work: pb.ClientWork) -> str:
    """Rounds in which its update came last, of those with other clients: 12 of 20 (60 %)."""
    return _share(work.rounds_last, work.rounds)


def _share(number: int, of: int) -> str:
    return f"{number:,} of {of:,} ({100 * number / of:.0f} %)" if of else NOTHING


def work_seconds(work: pb.ClientWork) -> str:
    """Median seconds of work; a dash if unknown."""
    return units.duration(work.work_s) if work.HasField("work_s") else NOTHING


def transfer_seconds(work: pb.ClientWork) -> str:
    """Median seconds of transfer; a dash if unknown."""
    return units.duration(work.transfer_s) if work.HasField("transfer_s") else NOTHING


def epsilon(work: pb.ClientWork) -> str:
    """What its data has spent, as the device states it: 1.2 at 1e-05. A dash if it does not."""
    return f"{work.epsilon:.3g} at {work.delta:g}" if work.HasField("epsilon") else NOTHING


def needs(client: pb.ClientStatus) -> str:
    """Why it needs attention first of all; empty if it needs none."""
    return client.attention[0].why if client.attention else ""


def facts(client: pb.ClientStatus) -> list[Fact]:
    """Why it needs attention with the commands that help, and what became of its work."""
    work = client.work
    slower = f", {work.slowness:.1f} times the time of the others" if work.HasField("slowness") else ""
    return [
        *(fact("needs attention", f"{need.why}; {need.remedy}") for need in client.attention),
        fact("assignments", _ended(work)),
        fact("newest", counts(work.newest, ENDS)),
        fact("last failure", *_last(work.last_failure)),
        fact("last refusal", *_last(work.last_refusal)),
        fact("work", f"{work_seconds(work)} (median){slower}" if work.HasField("work_s") else ""),
        fact("transfer", f"{transfer_seconds(work)} (median)" if work.HasField("transfer_s") else ""),
        fact("came last in", f"{came_last(work)} rounds" if work.rounds else ""),
        fact("privacy", f"epsilon {work.epsilon:.3g} at delta {work.delta:g}" if work.HasField("epsilon") else ""),
    ]


def _ended(work: pb.ClientWork) -> str:
    """For example: 114: 60 admitted, 7 refused, 47 failed (41 %)."""
    if not work.assignments:
        return ""
    numbers = {end: getattr(work, end) for end in ENDS}
    share = f"; failed {100 * work.failed / work.assignments:.0f} %" if work.failed else ""
    return f"{work.assignments:,} ended: {counts(numbers, ENDS)}{share}"


def _last(ended: pb.EndedWork) -> tuple[Part, ...]:
    if not ended.time.seconds:
        return ()
    # "-": a run that is not named, because the caller may not see it or its draws are secret.
    where = "a run that is not named" if ended.run_id == "-" else f"run {ended.run_id} round {ended.round}"
    return f"{where}: {ended.message}, on ", ended.time
