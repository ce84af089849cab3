"""The history as one stream for all browsers of an identity: entries by number, none lost and none twice."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from fl_web.coordinator.calls import Calls
from fl_web.coordinator.mailbox import Mailbox
from fl_web.coordinator.watch import Watch
from protos.fl.v1 import admin_pb2 as pb

_MOST_KEPT = 2000
"""Newest entries in memory, for browsers that come back after a cut."""


class HistoryWatch(Watch):
    """The watch of the whole history."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls
        self._kept: deque[pb.HistoryEntry] = deque()
        self._covered_from: int | None = None
        """All entries with a larger number, up to `last`, are in `_kept`. None: nothing was read yet."""
        self.last: int | None = None
        """Number up to which the history was read."""
        self._changed = time.monotonic()

    @property
    def unchanged_since(self) -> float:
        """Since when there was no new entry, by the monotonic clock; now while the stream is not open."""
        is_read = self.mailboxes and self.link is not None and self.link.up
        return self._changed if is_read else time.monotonic()

    @asynccontextmanager
    async def following(self, mailbox: Mailbox, after: int) -> AsyncIterator[None]:
        """Deliver the entries after a number, and then each new one."""
        if self.last is None:
            self._covered_from = self.last = after
        elif self._covered_from is None or after < self._covered_from:
            await self._deliver_older(mailbox, after)
        else:
            # Also for a number that is ahead of the watch: the entries up to it are not delivered again.
            mailbox.put_entries([entry for entry in self._kept if entry.number > after], max(after, self.last))
        with self.joined(mailbox):
            yield

    async def _deliver_older(self, mailbox: Mailbox, after: int) -> None:
        """Deliver what the watch does not keep. Entries that the watch reads meanwhile are taken from it at the end."""
        request = pb.WatchHistoryRequest(after_number=after)
        entries: list[pb.HistoryEntry] = []
        reached = after
        async with aclosing(self._calls.stream("WatchHistory", request, pb.WatchHistoryResponse)) as responses:
            async for response in responses:
                entries.extend(response.entries)
                reached = max(reached, response.last_number)
                if reached >= (self._covered_from or 0):
                    break
        entries += [entry for entry in self._kept if entry.number > reached]
        mailbox.put_entries(entries, max(reached, self.last or 0))

    async def read(self) -> None:
        """Read from the last number on, and deliver."""
        request = pb.WatchHistoryRequest(after_number=self.last)
        async with aclosing(self._calls.stream("WatchHistory", request, pb.WatchHistoryResponse)) as responses:
            self._changed = time.monotonic()
            async for response in responses:
                self.reached()
                self._take(response.entries, response.last_number)

    def _take(self, entries: Sequence[pb.HistoryEntry], number: int) -> None:
        new = [entry for entry in entries if entry.number > (self.last or 0)]
        self.last, self._changed = number, time.monotonic()
        self._kept.extend(new)
        while len(self._kept) > _MOST_KEPT:
            self._covered_from = self._kept.popleft().number
        for mailbox in self.mailboxes:
            mailbox.put_entries(new, number)
