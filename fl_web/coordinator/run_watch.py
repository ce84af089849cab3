"""The watches of single runs. All browsers of an identity that show a run share its watch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing, contextmanager

from fl_web.coordinator.calls import Calls
from fl_web.coordinator.errors import Unreachable
from fl_web.coordinator.mailbox import Mailbox
from fl_web.coordinator.watch import Watch
from protos.fl.v1 import admin_pb2 as pb


class RunWatch(Watch):
    """The watch of one run, until the run ends."""

    def __init__(self, calls: Calls, run_id: str) -> None:
        super().__init__()
        self._calls, self._run_id = calls, run_id
        self.newest: pb.RunStatus | None = None

    async def read(self) -> None:
        """Read the run's events, and deliver the status after each."""
        request = pb.WatchRunRequest(run_id=self._run_id)
        async with aclosing(self._calls.stream("WatchRun", request, pb.WatchRunResponse)) as events:
            async for event in events:
                self.reached()
                self.newest = event.run
                for mailbox in self.mailboxes:
                    mailbox.put_run(event.run)
        if self.newest is None or not self.newest.HasField("ended"):
            # A coordinator that stops ends the streams of runs that go on.
            raise Unreachable("the coordinator closed the connection")


class RunWatches:
    """The watches of all runs that are shown."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._open: dict[str, RunWatch] = {}

    @contextmanager
    def following(self, mailbox: Mailbox, run_id: str) -> Iterator[None]:
        """Deliver the run's status after each of its events."""
        for idle in [each for each, watch in self._open.items() if watch.idle]:
            del self._open[idle]
        watch = self._open.setdefault(run_id, RunWatch(self._calls, run_id))
        if watch.newest is not None and not watch.idle:
            mailbox.put_run(watch.newest)
        with watch.joined(mailbox):
            yield

    async def close(self) -> None:
        """Close all watches."""
        for watch in self._open.values():
            await watch.closed()
        self._open.clear()
