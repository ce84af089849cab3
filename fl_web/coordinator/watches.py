"""The watches upstream, of the history and of single runs. All browsers of an identity share them.

A watch continues by itself after the coordinator was away.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager

from fl_web.coordinator.calls import Calls, Unreachable, WebError, login_needed
from fl_web.coordinator.mailbox import LinkState, Mailbox
from protos.fl.v1 import admin_pb2 as pb

LINGER_S = 10.0
"""A watch stays open for this time after its last browser left: a reload comes back within it."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 3.0


class Watch:
    """A stream of the coordinator that mailboxes share. Subclasses read the stream."""

    def __init__(self) -> None:
        self.mailboxes: set[Mailbox] = set()
        self.link: LinkState | None = None
        """None: not known yet."""
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.TimerHandle | None = None

    async def read(self) -> None:
        """Read the stream to its end, and deliver what comes. Calls `reached` after the first message."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Whether nobody needs it, and it is closed."""
        return not self.mailboxes and (self._task is None or self._task.done())

    @contextmanager
    def joined(self, mailbox: Mailbox) -> Iterator[None]:
        """Deliver to the mailbox for as long as the block lasts."""
        self.mailboxes.add(mailbox)
        if self.link is not None:
            mailbox.put_link(self.link)
        self._open()
        try:
            yield
        finally:
            self.mailboxes.discard(mailbox)
            if not self.mailboxes:
                self._closing = asyncio.get_running_loop().call_later(LINGER_S, self.close)

    def close(self) -> None:
        """End the stream."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def reached(self) -> None:
        """The coordinator has answered."""
        self._report(LinkState(up=True))

    def _open(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep_reading())

    async def _keep_reading(self) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                return await self.read()
            except Unreachable as error:
                wait_s = _FIRST_WAIT_S if self.link is not None and self.link.up else wait_s
                self._report(LinkState(up=False, why=str(error)))
            except Exception as error:
                for mailbox in self.mailboxes:
                    mailbox.end(error)
                if not (isinstance(error, WebError) or login_needed(error)):
                    raise
                return None
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _report(self, link: LinkState) -> None:
        if link.up != (self.link.up if self.link is not None else None):
            self.link = link
            for mailbox in self.mailboxes:
                mailbox.put_link(link)

    async def closed(self) -> None:
        """Close it, and wait for the end of its task. A task that had failed told its mailboxes why."""
        task = self._task
        self.close()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)


class RunWatch(Watch):
    """The watch of one run, until the run ends."""

    def __init__(self, calls: Calls, run_id: str) -> None:
        super().__init__()
        self._calls, self._run_id = calls, run_id

    async def read(self) -> None:
        """Read the run's events, and report a change after each."""
        ended, request = False, pb.WatchRunRequest(run_id=self._run_id)
        async with aclosing(self._calls.stream(request, pb.WatchRunResponse)) as events:
            async for event in events:
                self.reached()
                ended = event.run.HasField("ended")
                for mailbox in self.mailboxes:
                    mailbox.has_changed()
        if not ended:
            # A coordinator that stops ends the streams of runs that go on.
            raise Unreachable("the coordinator closed the connection")


class RunWatches:
    """The watches of all runs that are shown."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._open: dict[str, RunWatch] = {}

    @contextmanager
    def following(self, mailbox: Mailbox, run_id: str) -> Iterator[None]:
        """Report a change after each event of the run."""
        for idle in [followed for followed, watch in self._open.items() if watch.idle]:
            del self._open[idle]
        watch = self._open.setdefault(run_id, RunWatch(self._calls, run_id))
        with watch.joined(mailbox):
            yield

    async def close(self) -> None:
        """Close all watches."""
        for watch in self._open.values():
            await watch.closed()
        self._open.clear()


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
        async with aclosing(self._calls.stream(request, pb.WatchHistoryResponse)) as responses:
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
        async with aclosing(self._calls.stream(request, pb.WatchHistoryResponse)) as responses:
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
