"""What has changed since a browser was last sent something."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos.fl.v1 import admin_pb2 as pb

_MOST_ENTRIES = 5000
"""Entries that wait for a browser. One that has fallen further behind connects again, from the number that it has."""


@dataclass(frozen=True, slots=True)
class LinkState:
    """The connection to the coordinator."""

    up: bool
    why: str = ""
    """Why there is none."""


@dataclass(slots=True)
class News:
    """Changes since the last `take`."""

    entries: list[pb.HistoryEntry] = field(default_factory=list)
    number: int | None = None
    """Every entry up to this number has been delivered. None: nothing new."""
    links: list[LinkState] = field(default_factory=list)


class Mailbox:
    """The changes for one browser. Watches put them in; the browser's stream takes all of them at once."""

    def __init__(self, number: int = 0) -> None:
        """number: the browser has the history up to this number."""
        self._news, self._changed, self._number = News(), asyncio.Event(), number
        self.changed_at = 0.0
        """When the newest change came, by the monotonic clock."""
        self.overrun = False
        """True: the browser did not keep up. Its stream ends, and it connects again."""
        self.ended: Exception | None = None
        """Why a watch ended for good."""

    def put_entries(self, entries: Sequence[pb.HistoryEntry], number: int) -> None:
        """Entries of the history, in order; number: of the last one that was read, shown to the caller or not.

        Entries that the browser has are passed over.
        """
        new = [entry for entry in entries if entry.number > self._number]
        if len(self._news.entries) + len(new) > _MOST_ENTRIES:
            self.overrun = True
        elif number > self._number:
            self._news.entries.extend(new)
            self._news.number = self._number = number
        self.has_changed()

    def put_link(self, link: LinkState) -> None:
        """The connection to the coordinator was lost, or is back."""
        self._news.links.append(link)
        self.has_changed()

    def end(self, error: Exception) -> None:
        """A watch cannot go on."""
        self.ended = error
        self.has_changed()

    def has_changed(self) -> None:
        """Something that the browser is shown has changed; its stream reads what."""
        self.changed_at = time.monotonic()
        self._changed.set()

    async def wait(self, seconds: float) -> None:
        """Wait for a change, at most so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    def take(self) -> News:
        """The changes so far."""
        news, self._news = self._news, News()
        self._changed.clear()
        return news
