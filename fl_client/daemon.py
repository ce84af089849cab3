"""The running daemon: stays connected, executes assignments, and stops cleanly."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import structlog

from fl_client.assignments import deadline
from fl_client.assignments.executor import Services
from fl_client.assignments.manager import AssignmentManager
from fl_client.connection.session_manager import SessionManager
from fl_client.enrollment.renewal import CertificateRenewal
from fl_client.errors import TransportError
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()

GOODBYE_SECONDS = 1.0
"""Time for the report that this daemon stops."""

STEP_SECONDS = 1.0
"""Time for the current training step to end."""


class Daemon:
    """One device that trains for one coordinator."""

    def __init__(self, sessions: SessionManager, services: Services, renewal: CertificateRenewal | None = None) -> None:
        """renewal: of a certificate from the coordinator; None: the owner renews the files, or there are none."""
        self._sessions = sessions
        self._services = services
        self._renewal = renewal

    async def run(self, stop: asyncio.Event) -> bool:
        """Run until `stop` is set. Returns False if a training step is in progress and does not end soon."""
        availability, link, state = self._services.availability, self._services.link, self._services.state
        policy, packages = self._services.policy, self._services.packages
        try:
            async with asyncio.TaskGroup() as tasks:
                assignments = AssignmentManager(self._services, tasks)
                await availability.check()
                policy.show_budget()  # before the first registration
                running = tasks.create_task(packages.run())
                await packages.begin(stop)
                attending = tasks.create_task(self._sessions.run(assignments))
                reports = [availability.run(), availability.report_changes(link), state.watch(), policy.run()]
                reports.append(deadline.watch(self._services.worker, availability))
                if self._renewal is not None:
                    reports.append(self._renewal.run())
                reporting = [*map(tasks.create_task, reports), running]
                await stop.wait()
                for task in reporting:
                    task.cancel()  # from here on only the goodbye reports the availability
                assignments.stop()
                await self._say_goodbye()
                attending.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            idle = await self._services.worker.shut_down(STEP_SECONDS)
            await policy.budget.save()
            await self._services.disk.close()
            await self._services.audit.close()
        return idle

    async def _say_goodbye(self) -> None:
        """Report that this daemon stops, if there is a session, so that the coordinator does not wait for it."""
        if (session := self._services.link.current) is None:
            return
        stopping = pb.Availability(
            may_train=False, reason=pb.UNAVAILABLE_REASON_STOPPING, detail="the daemon is stopping"
        )
        request = pb.ReportStatusRequest(session_id=session.id, availability=stopping)
        with suppress(TransportError, TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await session.connection.call(request, pb.ReportStatusResponse)
