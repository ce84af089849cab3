"""One watch upstream for many mailboxes. It continues by itself after the coordinator was away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from fl_web.coordinator.errors import Unreachable, WebError, login_needed
from fl_web.coordinator.mailbox import Link, Mailbox

LINGER_S = 10.0
"""A watch stays open for this time after its last browser left: a reload comes back within it."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 3.0


class Watch:
    """A stream of the coordinator that mailboxes share. Subclasses read the stream."""

    def __init__(self) -> None:
        self.mailboxes: set[Mailbox] = set()
        self.link: Link | None = None
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
        self._report(Link(up=True))

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
                self._report(Link(up=False, why=str(error)))
            except Exception as error:
                for mailbox in self.mailboxes:
                    mailbox.end(error)
                if not (isinstance(error, WebError) or login_needed(error)):
                    raise
                return None
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _report(self, link: Link) -> None:
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
