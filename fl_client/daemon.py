"""The long-running part: stay connected and work, until it is told to stop."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog

from fl_client.attendance import Attendance
from fl_client.desk import Desk
from fl_client.errors import TransportError
from fl_client.work import Tools
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()

GOODBYE_SECONDS = 1.0
"""For telling the coordinator that this daemon stops."""

STEP_SECONDS = 1.0
"""For the training step under way to end."""


class Daemon:
    """One device at work for one coordinator."""

    def __init__(self, attendance: Attendance, tools: Tools) -> None:
        self._attendance = attendance
        self._tools = tools

    async def run(self, stop: asyncio.Event) -> bool:
        """Work until `stop` is set; then True, or False if a training step is still going on and will not end soon."""
        try:
            async with asyncio.TaskGroup() as tasks:
                desk, keeper = Desk(self._tools, tasks), self._tools.gatekeeper
                await keeper.look()
                attending = tasks.create_task(self._attendance.keep(desk))
                gates = [tasks.create_task(keeper.watch()), tasks.create_task(keeper.tell(self._tools.link))]
                await stop.wait()
                for task in gates:
                    task.cancel()  # from here on it is the goodbye that says whether this device may train
                desk.clear()
                await self._say_goodbye()
                attending.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            idle = await self._tools.worker.idle(STEP_SECONDS)
            await self._tools.disk.idle()
        return idle

    async def _say_goodbye(self) -> None:
        """Tell the coordinator, if it is there, so that it need not wait for this device."""
        if (session := self._tools.link.current) is None:
            return
        stopping = pb.Availability(
            may_train=False, reason=pb.UNAVAILABLE_REASON_STOPPING, detail="the daemon was told to stop"
        )
        request = pb.ReportStatusRequest(session_id=session.id, availability=stopping)
        with suppress(TransportError, TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await session.connection.report_status(request)
