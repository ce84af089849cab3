"""The event stream of one browser for one view."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

from fl_web.coordinator.calls import SHARED_S
from fl_web.coordinator.errors import Unreachable, WebError, login_needed
from fl_web.coordinator.mailbox import Link, Mailbox, News
from fl_web.live.curve_updates import CurveUpdates
from fl_web.live.messages import KEEPALIVE, message, opening
from fl_web.live.readings import Readings, Shown
from fl_web.rendering import rendered
from fl_web.views.events import matches

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
            async for each in self._watched():
                yield each
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
            async for each in self._changes():
                yield each

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
            for each in [*self._links(news), *self._entries(news), *await self._parts()]:
                sent = True
                yield each
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
            link: Link = news.links[-1]
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
        found = [message("parts", changed)] if changed else []
        if self._view.watches_run and (update := self._curves.since_last(context)) is not None:
            found.append(message("curves", update))
        return found
