"""A run: its state, the round now with each client, its curves, refusals and restarts, and its configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict

from fl_web.charts import marks, present_charts
from fl_web.coordinator.calls import Failed, NotFound, WrongInput
from fl_web.coordinator.reader import MARKED, Reader
from fl_web.facts import run as run_facts
from fl_web.facts.rounds import Round, seconds_of, worst_first
from fl_web.facts.words import event_words, known, without_repeats
from fl_web.views.view import Context, Params, View
from protos.fl.v1 import admin_pb2 as pb


def configuration(spec: pb.RunSpec) -> list[tuple[str, list[tuple[str, str]]]]:
    """(section, rows) of a run's spec; rows: (name, value). Values without a section come first."""
    content = MessageToDict(spec, preserving_proto_field_name=True)
    plain = [(name, _text(value)) for name, value in content.items() if not isinstance(value, dict)]
    sections = [(name, list(_rows(value))) for name, value in content.items() if isinstance(value, dict)]
    return [("run", plain), *sections]


def _rows(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _rows(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) if value else "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(member)}" for name, member in value.items())
    return str(value)


_HISTORY = 500
"""Newest entries of a run's history that are read: most are those of every round, which are not shown."""
_SHOWN_ENTRIES, _SHOWN_ROUNDS, _SHOWN_MARKS, _SHOWN_CLIENTS, _SHOWN_WORST = 6, 25, 200, 100, 4
_TABLE_ROWS = 60
"""The rows of the table beside a curve. All rounds are in the CSV file."""


async def _context(reader: Reader, params: Params) -> Context:
    run_id = params.text("id")
    overview, who = await asyncio.gather(reader.overview(), reader.who_am_i())
    run, history = await asyncio.gather(reader.run(run_id), reader.entries(run_id, _HISTORY))
    rounds, cohort, evaluations, needy = await asyncio.gather(
        reader.rounds(run_id) if run.rounds_done else _nothing(),
        _cohort(reader, run),
        _evaluations(reader, run),
        reader.clients(pb.ListClientsRequest(page_size=_SHOWN_CLIENTS, marks=["attention"])),
    )
    of_runs = {run_id} if run.HasField("ended") else {"", run_id}
    bad = [client for client in needy.clients if client.attention and client.attention[0].run_id in of_runs]
    attention = [] if run.HasField("ended") else known(run_facts.attention(run))
    if run.latest_failure.client_id in {client.client_id for client in bad}:
        attention = [of for of in attention if of.name != "failed"]  # its own line has the failure
    events, created = mark_events(await reader.marked_entries(run_id, history)), seconds_of(run.created)
    return {
        "title": run_id,
        "run": run,
        "attention": attention,
        "bad": bad,
        "worst": worst_first(evaluations)[:_SHOWN_WORST] if evaluations else [],
        "figures": [*run_facts.figures(run), *run_facts.models(run)],
        "rounds": rounds,
        "newest": list(reversed(rounds[-_SHOWN_ROUNDS:])),
        "charts": present_charts(rounds),
        "table_rows": _TABLE_ROWS,
        "created": created,
        "cohort": cohort,
        "evaluations": evaluations,
        "marks": list(reversed(marks(rounds, created, events)))[:_SHOWN_MARKS],
        "entries": without_repeats(history.entries, _SHOWN_ENTRIES),
        "configuration": configuration(run.spec),
        "refused_open": sum(run.account.refused.values()) - sum(sum(row.refused.values()) for row in rounds),
        "may_export": "ExportModel" in who.methods,
        "number": overview.history_number,
        "active": not run.HasField("ended"),
        "params": params,
    }


async def _nothing() -> list[Round]:
    return []


async def _cohort(reader: Reader, run: pb.RunStatus) -> pb.ListCohortResponse | None:
    """The clients of the round now. None: the run has ended, or they are hidden."""
    if run.HasField("ended") or run.cohorts_hidden:
        return None
    try:
        return await reader.cohort(run.run_id, _SHOWN_CLIENTS)
    except Failed:
        return None


async def _evaluations(reader: Reader, run: pb.RunStatus) -> pb.ListEvaluationsResponse | None:
    """The clients' evaluations of the newest evaluated round; None if there is none."""
    if not run.spec.evaluation.clients_every or run.spec.HasField("secure_aggregation"):
        return None
    try:
        return await reader.evaluations(run.run_id, _SHOWN_CLIENTS)
    except (WrongInput, NotFound):
        return None


def mark_events(entries: Sequence[pb.HistoryEntry]) -> list[dict[str, Any]]:
    """Marked entries as marks of the time axis."""
    return [
        {"time": seconds_of(entry.time), "kind": MARKED[entry.event], "text": event_words(entry.event, entry.detail)}
        for entry in entries
    ]


RUN = View(
    "run",
    _context,
    ("head", "now", "clients", "figures", "charts", "evaluations", "rounds", "marks", "events"),
    watches_run=True,
    refresh_s=2.0,
)
