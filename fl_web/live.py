"""Server-sent events: a page's changes while it is open.

The id of an event is a number of the ledger's history. A browser that connects again sends the last one that it has,
and gets what came after it, each entry once. Values that are no entries are sent again as a whole, so a cut loses
nothing. The messages are as https://html.spec.whatwg.org/multipage/server-sent-events.html defines them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from fl_common.waiting import shielded
from fl_web.charts import chart_json
from fl_web.coordinator.calls import SHARED_S, Unreachable, WebError, has_failed, login_needed
from fl_web.coordinator.mailbox import LinkState, Mailbox, News
from fl_web.coordinator.reader import Reader
from fl_web.facts.rounds import Round
from fl_web.rendering import rendered
from fl_web.views.events import matches
from fl_web.views.view import Context, Params, View

RETRY_MS = 1500
"""Wait of a browser before it connects again."""


def message(event: str, data: Any, number: int | None = None) -> bytes:
    """One event. number: of the history, up to which the browser has everything with this event."""
    lines = [f"event: {event}", f"data: {json.dumps(data, separators=(',', ':'), allow_nan=False)}"]
    if number is not None:
        lines.insert(0, f"id: {number}")
    return "\n".join([*lines, "", ""]).encode()


def opening() -> bytes:
    """The first bytes of a stream: the wait before a new connection."""
    return f"retry: {RETRY_MS}\n\n".encode()


KEEPALIVE = b": keepalive\n\n"
"""A comment: it shows a proxy, and a server whose browser has gone, that the stream is open."""


_COMPARED = 25
"""Newest rounds whose values may still change: an evaluation comes after its round."""


class CurveUpdates:
    """What one browser has of the curves of a run. It reads the curves once itself, after its stream is open."""

    def __init__(self) -> None:
        self._seen: dict[int, Round] | None = None
        self._marks = 0

    def since_last(self, context: dict[str, Any]) -> dict[str, Any] | None:
        """New and changed points by chart; None if there are none. context: of the view of a run."""
        rounds: list[Round] = context["rounds"]
        newest = {row.round: row for row in rounds[-_COMPARED:]}
        before, self._seen = self._seen, newest
        marks, self._marks = self._marks, len(context["marks"])
        if before is None:
            return {"reload": True}
        first = max(before, default=-1)
        if rounds and rounds[-1].round - first > _COMPARED:
            return {"reload": True}
        changed = [
            row for row in newest.values() if before.get(row.round) != row and row.round >= min(before, default=0)
        ]
        if not changed and marks == self._marks:
            return None
        charts = [chart_json(chart, rounds, context["run"], changed) for chart in context["charts"]]
        return {"charts": charts, "marks": context["marks"]}


_MOST_KEPT = 64
"""Readings in memory: at most so many views are read without sharing."""
Key = tuple[int, str, str]


@dataclass(frozen=True, slots=True)
class Shown:
    """What a page shows: a view with the values of its address, for an identity."""

    view: View
    reader: Reader
    params: Params


@dataclass(frozen=True, slots=True)
class Reading:
    """The values of a view at a time, and the HTML of each of its parts."""

    context: Context
    parts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Kept:
    reader: Reader
    """Kept too, so that its id is not another's."""
    began: float
    task: asyncio.Task[Reading]


class Readings:
    """The readings of all pages of this process."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()

    async def of(self, shown: Shown, since: float) -> Reading:
        """A reading that began not before `since`, by the monotonic clock. Raises as the view's context does."""
        key = (id(shown.reader), shown.view.name, shown.params.address())
        kept = self._kept.get(key)
        if kept is None or kept.began < since or has_failed(kept.task):
            kept = self._kept[key] = _Kept(shown.reader, time.monotonic(), asyncio.create_task(_read(shown, since)))
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return await shielded(kept.task)


async def _read(shown: Shown, since: float) -> Reading:
    context = await shown.view.context(shown.reader.since(since), shown.params)
    return Reading(context, {name: rendered(template, context) for name, template in shown.view.parts.items()})


_KEEPALIVE_S = 15.0
_LATE_S = 0.002
"""A timer may be early by less than this."""
_PAUSE_S = 0.4
"""Least time between two batches of messages for one browser: a busy run has many events a second."""


class ViewStream:
    """What one browser is sent while it shows a view."""

    def __init__(self, shown: Shown, after: int, readings: Readings) -> None:
        """after: the browser has the history up to this number. readings: those of all pages."""
        self._shown, self._view, self._reader, self._params = shown, shown.view, shown.reader, shown.params
        self._after, self._mailbox, self._readings = after, Mailbox(after), readings
        self._opened = time.monotonic() - SHARED_S
        """Values of this time are new enough for a browser that has just loaded the page."""
        self._sent: Mapping[str, str] = {}
        """Content of each part as it was sent last."""
        self._curves = CurveUpdates()
        self._passes = matches(shown.params)
        self._stale = self._active = True
        """Whether the parts must be read again; whether values change without an event."""
        self._next_read = 0.0
        """The parts are not read before, by the monotonic clock."""

    async def messages(self) -> AsyncIterator[bytes]:
        """The events, until the browser leaves. Ends where the browser must connect again, or log in."""
        yield opening()
        try:
            async for part in self._watched():
                yield part
        except Exception as error:
            if not login_needed(error):
                raise
            yield message("login", {})

    async def _watched(self) -> AsyncIterator[bytes]:
        async with AsyncExitStack() as watches:
            try:
                await self._join(watches)
            except Unreachable as error:
                yield message("link", {"up": False, "why": str(error)})
                await asyncio.sleep(_PAUSE_S)
                return
            except WebError as error:
                yield message("problem", {"title": error.title, "text": str(error)})
                return
            async for part in self._changes():
                yield part

    async def _join(self, watches: AsyncExitStack) -> None:
        await watches.enter_async_context(self._reader.history.following(self._mailbox, self._after))
        if self._view.watches_run:
            watches.enter_context(self._reader.watches.following(self._mailbox, self._params.text("id")))

    async def _changes(self) -> AsyncIterator[bytes]:
        last_sent = time.monotonic()
        while not self._mailbox.overrun:
            news = self._mailbox.take()
            if self._mailbox.ended is not None:
                if login_needed(self._mailbox.ended):
                    raise self._mailbox.ended
                yield message("problem", {"title": "The view cannot go on", "text": str(self._mailbox.ended)})
                return
            sent = False
            for part in [*self._links(news), *self._entries(news), *await self._parts()]:
                sent = True
                yield part
            if sent:
                last_sent = time.monotonic()
            elif time.monotonic() - last_sent > _KEEPALIVE_S:
                last_sent = time.monotonic()
                yield KEEPALIVE
            await asyncio.sleep(_PAUSE_S)
            await self._mailbox.wait(self._quiet_s())
            self._stale = True

    @property
    def _period_s(self) -> float:
        """The values are read again at each multiple of it, so that all pages of a view read at the same moment."""
        return self._view.refresh_s if self._view.refresh_s and self._active else _KEEPALIVE_S

    def _quiet_s(self) -> float:
        """How long nothing is done without a change."""
        now = time.monotonic()
        quiet_s = self._period_s - now % self._period_s + _LATE_S
        return min(quiet_s, max(0.0, self._next_read - now)) if self._stale else quiet_s

    def _due(self, now: float) -> float:
        """The moment whose values must be read: of the newest change, or the last multiple of the period."""
        return max(self._opened, self._mailbox.changed_at, now - now % self._period_s)

    def _links(self, news: News) -> Iterator[bytes]:
        if news.links:
            link: LinkState = news.links[-1]
            yield message("link", {"up": link.up, "why": link.why})

    def _entries(self, news: News) -> Iterator[bytes]:
        if news.number is None:
            return
        rows: list[dict[str, Any]] = []
        if self._view.adds_entries:
            rows = [
                {"number": entry.number, "html": rendered("events/_row.html", {"entry": entry})}
                for entry in news.entries
                if self._passes(entry)
            ]
        yield message("entries", rows, news.number)

    async def _parts(self) -> list[bytes]:
        """The parts that have changed."""
        now = time.monotonic()
        if not self._stale or not self._view.parts or now < self._next_read:
            return []
        self._next_read, self._stale = now + self._view.pause_s, False
        try:
            reading = await self._readings.of(self._shown, self._due(now))
        except Unreachable:
            self._stale = True
            return []  # the watch of the history reports it
        except WebError as error:
            return [message("problem", {"title": error.title, "text": str(error)})]
        context = reading.context
        self._active = context.get("active") is not False
        changed = {name: text for name, text in reading.parts.items() if self._sent.get(name) != text}
        self._sent = reading.parts
        messages = [message("parts", changed)] if changed else []
        if self._view.watches_run and (update := self._curves.since_last(context)) is not None:
            messages.append(message("curves", update))
        return messages
