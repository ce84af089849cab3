"""The event stream of one browser for one view."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

from fl_web.coordinator.errors import Unreachable, WebError, login_needed
from fl_web.coordinator.mailbox import Link, Mailbox, News
from fl_web.coordinator.reader import Reader
from fl_web.live.curve_updates import CurveUpdates
from fl_web.live.messages import KEEPALIVE, message, opening
from fl_web.render.templates import rendered
from fl_web.views.events import matches
from fl_web.views.view import Params, View

_KEEPALIVE_S = 15.0
_PAUSE_S = 0.4
"""Least time between two batches of messages for one browser: a busy run has many events a second."""


class ViewStream:
    """What one browser is sent while it shows a view."""

    def __init__(self, view: View, reader: Reader, params: Params, after: int) -> None:
        """after: the browser has the history up to this number."""
        self._view, self._reader, self._params = view, reader, params
        self._after, self._mailbox = after, Mailbox(after)
        self._sent: dict[str, str] = {}
        """Content of each part as it was sent last."""
        self._curves = CurveUpdates()
        self._passes = matches(params)
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

    def _quiet_s(self) -> float:
        """How long nothing is done without a change."""
        quiet_s = self._view.refresh_s if self._view.refresh_s and self._active else _KEEPALIVE_S
        if not self._stale:
            return quiet_s
        return min(quiet_s, max(0.0, self._next_read - time.monotonic()))

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
        if not self._stale or not self._view.parts or time.monotonic() < self._next_read:
            return []
        self._next_read, self._stale = time.monotonic() + self._view.pause_s, False
        try:
            context = await self._view.context(self._reader, self._params)
        except Unreachable:
            self._stale = True
            return []  # the watch of the history reports it
        except WebError as error:
            return [message("problem", {"title": error.title, "text": str(error)})]
        self._active = context.get("active") is not False
        contents = {name: rendered(template, context) for name, template in self._view.parts.items()}
        changed = {name: text for name, text in contents.items() if self._sent.get(name) != text}
        self._sent = contents
        found = [message("parts", changed)] if changed else []
        if self._view.watches_run and (update := self._curves.since_last(context)) is not None:
            found.append(message("curves", update))
        return found
