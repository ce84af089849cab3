"""The clients of the round under way, each with its phase: in one line, and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from fl_common import units
from fl_common.units import NOTHING
from fl_ops.render.fitted import FittedTable
from fl_ops.render.sparkline import bar
from protos.fl.v1 import admin_pb2

MOST_NAMED = 10
"""Clients of a line that are named; of more, the number in each phase is shown."""
PHASES = ("training", "uploading", "checking", "downloading", "assigned", "delivered",
          "refused", "failed", "lost", "out", "cancelled")  # fmt: skip
"""In the order in which they are counted."""
_BAR = 20
_MARKS = {"delivered": "●", "refused": "·", "failed": "·", "lost": "·", "out": "·", "cancelled": "·"}
"""Of a client that is not awaited any more; ○ is awaited."""


def cohort_line(run: admin_pb2.RunStatus, cohort: admin_pb2.ListCohortResponse | None) -> str:
    """The clients of a round that collects: ○ is awaited, with its phase, ● has delivered, · is out.

    cohort: None if it is not known, or of another round: then names alone are shown, and · may have delivered.
    """
    if run.phase != "collecting" or not run.cohort:
        return ""
    counted = f"{bar(run.admitted, len(run.cohort), _BAR)} {run.admitted} of {len(run.cohort)}"
    if cohort is None or cohort.round != run.rounds_done or not cohort.members:
        return f"{counted}{_names(run)}"
    if len(run.cohort) > MOST_NAMED:
        return f"{counted}  {by_phase(cohort).plain}"
    return f"{counted}  " + "  ".join(map(_named, cohort.members))


def by_phase(cohort: admin_pb2.ListCohortResponse) -> Text:
    """The number of clients in each phase: 3 training, 1 uploading."""
    counts = dict(cohort.by_phase)
    phases = [*(phase for phase in PHASES if phase in counts), *sorted(counts.keys() - {*PHASES})]
    return Text(units.plain(", ".join(f"{counts[phase]:,} {phase}" for phase in phases)))


def cohort_table(cohort: admin_pb2.ListCohortResponse) -> FittedTable:
    """A row for each client of the round."""
    table = FittedTable(
        ("Client", "Phase", ">Since", ">Transferred", "Detail"),
        optional=("Transferred", "Detail", "Since"),
        wraps=("Detail",),
        names_missing=False,
    )
    for member in cohort.members:
        moved = f"{units.size(member.done_bytes)} of {units.size(member.size_bytes)}" if member.size_bytes else NOTHING
        since = units.duration(member.phase_s) if member.HasField("phase_s") else NOTHING
        table.add_row(
            Text(units.plain(member.client_id)), Text(units.plain(member.phase)), since, moved,
            Text(units.plain(member.detail)),
        )  # fmt: skip
    return table


def _named(member: admin_pb2.CohortMember) -> str:
    mark = _MARKS.get(member.phase, "○")
    if member.phase == "delivered":
        return f"{mark} {member.client_id}"
    share = f" {100 * member.done_bytes // member.size_bytes} %" if member.size_bytes else ""
    since = f" {units.duration(round(member.phase_s))}" if member.phase == "training" and member.phase_s >= 1 else ""
    return f"{mark} {member.client_id} {member.phase}{share}{since}"


def _names(run: admin_pb2.RunStatus) -> str:
    if run.awaited_count > len(run.awaited):  # the others are not known by name
        return ""
    awaited = set(run.awaited)
    others: Sequence[str] = [client for client in run.cohort if client not in awaited]
    done = "●" if len(others) == run.admitted else "·"
    return "  " + "  ".join(f"{'○' if each in awaited else done} {each}" for each in run.cohort)
