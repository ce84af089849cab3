"""The history, the newest first, filtered by subject, kind, actor and text; the events of every round on demand."""

from __future__ import annotations

from collections.abc import Callable

from fl_web.coordinator.reader import Reader
from fl_web.facts.words import ROUTINE, alike, folded
from fl_web.views.view import Context, Params, View
from protos.fl.v1 import admin_pb2 as pb

_PAGE = 100
_AT_ONCE, _MOST_READ = 1000, 10_000
"""Entries that are read in a call, and at most for a page with a filter."""


def matches(params: Params) -> Callable[[pb.HistoryEntry], bool]:
    """Whether an entry passes the filters of an address."""
    subject, kinds = params.text("subject"), params.texts("kind")
    actor, text = params.text("actor").casefold(), params.text("q").casefold()
    rounds_too = bool(params.text("all") or kinds or text)

    def passes(entry: pb.HistoryEntry) -> bool:
        return (
            (not subject or entry.subject == subject)
            and (not kinds or any(kind in entry.event for kind in kinds))
            and actor in entry.actor.casefold()
            and (rounds_too or entry.event not in ROUTINE)
            and text in f"{entry.event} {entry.subject} {entry.detail}".casefold()
        )

    return passes


async def _context(reader: Reader, params: Params) -> Context:
    number = (await reader.overview()).history_number
    entries, older, newest = await _page(reader, params)
    return {
        "title": "Events",
        "entries": [(entry, 0) for entry in entries] if params.text("all") else folded(entries),
        "older": older,
        "first_page": not params.number("before"),
        "params": params,
        "number": max(number, newest),
    }


async def _page(reader: Reader, params: Params) -> tuple[list[pb.HistoryEntry], int, int]:
    """(entries, the newest first; number to continue before, 0 at the end; number of the newest entry read)."""
    before, subject, passes = params.number("before"), params.text("subject"), matches(params)
    filtered = any(params.text(name) for name in ("kind", "actor", "q")) or not params.text("all")
    passed: list[pb.HistoryEntry] = []
    newest = read = lines = 0
    while lines < _PAGE and read < _MOST_READ:
        response = await reader.entries(subject, _AT_ONCE if filtered else _PAGE, before)
        newest = max([newest, *(entry.number for entry in response.entries)])
        for entry in reversed(response.entries):
            if not passes(entry):
                continue
            new_line = bool(params.text("all")) or not passed or alike(passed[-1]) != alike(entry)
            if lines == _PAGE and new_line:
                return passed, passed[-1].number, newest
            passed.append(entry)
            lines += new_line
        read += max(1, len(response.entries))
        before = response.first_number
        if not before:
            return passed, 0, newest
    return passed, before, newest


EVENTS = View("events", _context, adds_entries=True)
