"""Renews this device's certificate while the daemon runs, with a new key each time.

The call uses the session's connection. The new files are written beside the old ones and replace them in one step; the
session then moves to a new connection (connection/session_manager.py), and work in progress is not disturbed.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from fl_client.connection.certificates import Certificates
from fl_client.connection.link import Backoff, Link, RetryDelays, Session
from fl_client.connection.transport import GrpcEnrollment
from fl_client.enrollment.folder import CertificateFolder, Issued, KeyRequest, checked, renew_time, signed
from fl_client.errors import ClientError, NotAllowed, TransportError, Unreachable
from fl_client.monitoring.metrics import Metrics
from fl_client.storage.disk import DiskThread
from fl_common.certificates.names import holder_of
from fl_common.certificates.pem import Pem
from protos.fl.v1.enrollment_pb2 import IssuedCertificate, ReenrollRequest, RenewRequest

log = structlog.get_logger()

CHECK_S = 60.0
"""Longest sleep: the clock of a device may be set, and a device may be suspended."""
DELAYS = RetryDelays(first=5.0, longest=600.0)
"""Waits after failures, unless little time is left."""
_JITTER = 0.1
"""Part of the time between renewal and end by which a renewal is delayed at random."""
_SHORTEST = 0.25
"""Part of that time which lies between two renewals at least, even if this device's clock is wrong."""
_TRIES_LEFT = 8
"""The wait after a failure is at most this part of the time that is left."""


@dataclass(frozen=True)
class Means:
    """What a renewal uses."""

    folder: CertificateFolder
    certificates: Certificates
    link: Link
    disk: DiskThread
    metrics: Metrics
    reenrollment: Callable[[bytes], GrpcEnrollment] | None = None
    """Trusted authorities -> calls at the port for enrollment, for an expired certificate. None: not possible."""


class CertificateRenewal:
    """The renewals of one daemon. Lives on the event loop; files are written on the disk's thread."""

    def __init__(self, means: Means, delays: RetryDelays = DELAYS) -> None:
        self._means, self._certificates, self._link = means, means.certificates, means.link
        self._delays, self._backoff = delays, Backoff(delays)
        self._reported = ""
        """Reason of the last failure in the log."""
        self._earliest = 0.0
        """The next renewal begins no earlier, on the monotonic clock."""

    async def run(self) -> None:
        """Renew until cancelled. No failure ends the daemon."""
        while True:
            try:
                await self._means.disk.run(self._means.folder.clean)
                await self._until_due()
                await self._renew()
            except Exception as error:  # a fault of the daemon must not end it: the certificate is valid for a while
                log.exception("renewal_broken")
                await asyncio.sleep(self._wait(Unreachable(str(error))))

    async def _until_due(self) -> None:
        pem, due = None, 0.0
        while True:
            if pem is not self._certificates.pem:
                pem = self._certificates.pem
                due = await self._due(pem)
            left = max(due - time.time(), self._earliest - time.monotonic())
            if left <= 0:
                return
            await asyncio.sleep(min(left, CHECK_S))
            await self._means.disk.run(self._restore, pem)

    async def _due(self, pem: Pem) -> float:
        """Unix seconds of the next renewal. Devices of a site that enrolled together do not renew together."""
        renew_after = await self._means.disk.run(self._means.folder.renew_after)
        rest = max(0.0, _end(pem) - renew_after)
        return renew_after + random.uniform(0.0, _JITTER) * rest  # noqa: S311 - no secret

    def _restore(self, pem: Pem) -> None:
        """Write the files again if they have vanished with the state directory."""
        folder = self._means.folder
        if folder.certificate() is None and pem.ca is not None:
            issued = _kept(pem)
            folder.install(issued)
            log.warning("certificate_written_again", path=str(folder.path))

    async def _renew(self) -> None:
        """Get the next certificate and use it, or wait until another try may succeed."""
        session, pem = self._link.current, self._certificates.pem
        try:
            request = await self._means.disk.run(self._means.folder.next_request)
            issued = checked(await self._ask(request, pem), request.key, holder_of(pem.leaf).name)
            await self._replace(issued)
        except NotAllowed as error:
            self._count("refused")
            todo = _ASK if time.time() < _end(pem) else _ENDED
            end = pem.leaf.not_valid_after_utc.isoformat()
            log.error("renewal_refused", reason=str(error), not_after=end, todo=todo)
            await self._means.disk.run(self._means.folder.drop_next)
            # Where the certificate has ended, no session can tell that the coordinator's settings have changed.
            longest = math.inf if time.time() < _end(pem) else self._delays.longest
            await self._until_changed(session, pem, longest)
        except (ClientError, OSError) as error:
            self._count("failed")
            wait = self._wait(error)
            if (reason := str(error)) != self._reported:
                self._reported = reason
                end = pem.leaf.not_valid_after_utc.isoformat()
                log.warning("renewal_failed", reason=reason, not_after=end, next_try_seconds=round(wait, 1))
            await asyncio.sleep(wait)

    async def _ask(self, request: KeyRequest, pem: Pem) -> IssuedCertificate:
        """The coordinator's answer, over the session, or with the expired certificate where there is no session."""
        left, calls = _end(pem) - time.time(), self._means.reenrollment
        if calls is not None and left <= 0 and self._link.current is None:
            message = ReenrollRequest(certificate=pem.cert, csr=request.csr, signature=signed(request.csr, pem.key))
            return await calls(pem.ca or b"").reenroll(message)
        try:
            async with asyncio.timeout(left if calls is not None and left > 0 else None):
                session = await self._link.session()
        except TimeoutError:
            raise Unreachable("there was no connection until the certificate ended") from None
        with session.calls:
            return (await session.connection.renew(RenewRequest(csr=request.csr))).issued

    async def _replace(self, issued: Issued) -> None:
        """Put the new files in use. The step itself is on the event loop, so that no other code there reads between."""
        folder, disk = self._means.folder, self._means.disk
        prepared = await disk.run(folder.prepare, issued)
        before = folder.activate(prepared)
        self._certificates.replaced()
        self._count("renewed")
        self._backoff.reset()
        self._reported = ""
        rest = _end(self._certificates.pem) - issued.renew_after
        self._earliest = time.monotonic() + max(1.0, _SHORTEST * rest)
        await disk.run(folder.settle, before)

    async def _until_changed(self, session: Session | None, pem: Pem, longest_s: float) -> None:
        """Wait for another session, which only an accepted client gets, or for other files; at most `longest_s`."""
        refused, ends = session and session.id, time.monotonic() + longest_s
        while time.monotonic() < ends:
            await asyncio.sleep(self._link.delays.certificate_check)
            current = self._link.current
            if self._certificates.pem is not pem or (current is not None and current.id != refused):
                return

    def _wait(self, error: Exception) -> float:
        """Seconds until the next try: shorter when the certificate ends soon."""
        requested = error.wait if isinstance(error, TransportError) else None
        wait = self._backoff.after(requested)
        if wait == requested:
            return wait
        left = _end(self._certificates.pem) - time.time()
        return min(wait, max(0.2, left / _TRIES_LEFT)) if left > 0 else wait

    def _count(self, result: str) -> None:
        self._means.metrics.renewals.labels(result).inc()


def _end(pem: Pem) -> float:
    return pem.leaf.not_valid_after_utc.timestamp()


def _kept(pem: Pem) -> Issued:
    """The files in memory. Their renewal time is not known any more, so it is computed from the dates."""
    leaf = pem.leaf
    serial = f"{leaf.serial_number:x}"
    return Issued(holder_of(leaf).name, pem.cert, pem.key, pem.ca or b"", serial, renew_time(leaf), {})


_ASK = (
    "this daemon asks again when the coordinator accepts it in a new session: ask its operator whether this device is"
    " banned or revoked (`fl clients show NAME`); with a new token, `fl-client init` gets a new certificate"
)
_ENDED = (
    "the certificate ended while this device was off or not connected, and the coordinator gives no new one for it; its"
    " setting enrollment.expired_grace_s is how long after the end it does. This daemon asks again every ten minutes."
    " `fl enroll create --name NAME` makes a token, with which `fl-client init` gets a new certificate at once"
)
