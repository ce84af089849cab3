"""The shared watch of the history, with a coordinator of a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any, cast

from fl_web.coordinator.calls import Calls, Unreachable
from fl_web.coordinator.mailbox import Mailbox
from fl_web.coordinator.watches import HistoryWatch
from protos.fl.v1 import admin_pb2 as pb


class Ledger:
    """Entries by number, and the streams that were opened. `cut` ends the open ones as a killed coordinator does."""

    def __init__(self) -> None:
        self.entries: list[pb.HistoryEntry] = []
        self.opened: list[int] = []
        """`after_number` of each stream."""
        self._changed = asyncio.Condition()
        self._cuts = 0

    async def add(self, *numbers: int) -> None:
        """New entries."""
        async with self._changed:
            self.entries += [pb.HistoryEntry(number=number) for number in numbers]
            self._changed.notify_all()

    async def cut(self) -> None:
        """End all open streams."""
        async with self._changed:
            self._cuts += 1
            self._changed.notify_all()

    async def stream(self, request: Any, response: Any) -> AsyncGenerator[pb.WatchHistoryResponse, None]:
        assert isinstance(request, pb.WatchHistoryRequest)
        after, cuts = request.after_number, self._cuts
        self.opened.append(after)
        first = True
        while True:
            new = [entry for entry in self.entries if entry.number > after]
            if new or first:
                after = max([after, *(entry.number for entry in new)])
                yield pb.WatchHistoryResponse(entries=new, last_number=after)
            first = False
            async with self._changed:
                while self._cuts == cuts and not any(entry.number > after for entry in self.entries):
                    await self._changed.wait()
            if self._cuts > cuts:
                raise Unreachable("cut")


async def numbers(mailbox: Mailbox, last: int) -> list[int]:
    """Numbers of all entries that come, until this one."""
    found: list[int] = []
    async with asyncio.timeout(60):
        while last not in found:
            await mailbox.wait(1)
            found += [entry.number for entry in mailbox.take().entries]
    return found


async def test_many_browsers_are_one_stream() -> None:
    """Also those that come later, and those that have less than the first."""
    ledger = Ledger()
    watch = HistoryWatch(cast(Calls, ledger))
    await ledger.add(1, 2, 3, 4, 5)
    mailboxes = [Mailbox(3) for _ in range(10)]
    async with AsyncExitStack() as open_:
        for mailbox in mailboxes:
            await open_.enter_async_context(watch.following(mailbox, 3))
        assert [await numbers(mailbox, 5) for mailbox in mailboxes] == [[4, 5]] * 10
        late = Mailbox(4)
        await open_.enter_async_context(watch.following(late, 4))
        await ledger.add(9)
        assert await numbers(late, 9) == [5, 9]
        assert ledger.opened == [3]
        older = Mailbox(1)
        await open_.enter_async_context(watch.following(older, 1))
        assert await numbers(older, 9) == [2, 3, 4, 5, 9]
        assert ledger.opened == [3, 1]
    await watch.closed()


async def test_a_cut_loses_nothing_and_repeats_nothing() -> None:
    """The watch continues after the last number, and reports the loss and the return."""
    ledger = Ledger()
    watch, mailbox = HistoryWatch(cast(Calls, ledger)), Mailbox(0)
    await ledger.add(1, 2)
    async with watch.following(mailbox, 0):
        assert await numbers(mailbox, 2) == [1, 2]
        await ledger.cut()
        await ledger.add(7, 8)
        links: list[bool] = []
        found: list[int] = []
        async with asyncio.timeout(60):
            while 8 not in found:
                await mailbox.wait(1)
                news = mailbox.take()
                found += [entry.number for entry in news.entries]
                links += [link.up for link in news.links]
        assert found == [7, 8]
        assert links == [False, True]
        assert ledger.opened == [0, 2]
    await watch.closed()


async def test_a_browser_ahead_of_the_watch_gets_only_newer_entries() -> None:
    """Its page was made after the watch had read last."""
    ledger = Ledger()
    watch, first, ahead = HistoryWatch(cast(Calls, ledger)), Mailbox(0), Mailbox(5)
    async with watch.following(first, 0), watch.following(ahead, 5):
        await ledger.add(4, 5, 6)
        assert await numbers(ahead, 6) == [6]
        assert await numbers(first, 6) == [4, 5, 6]
    await watch.closed()
