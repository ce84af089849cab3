"""The services that give certificates to devices: Enrollment without a certificate, Certificates with one.

At `enroll_listen`, where callers have no name, requests are limited for each address and for the whole port. An address
that only guesses is stopped by its failures, and does not reach the limit of the port.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal

import grpc.aio
import structlog

from fl_common.rate_limits import TokenBucket, TokenBuckets, network_of
from fl_server import identity
from fl_server.audit.log import AuditLog
from fl_server.audit.writer import AuditRecord
from fl_server.enrollment.issuing import Issued, Issuer
from fl_server.errors import Forbidden, InvalidInput, LimitExceeded, NotConfigured, NotEnrolled, ServerError, TooMany
from fl_server.identity import ANYBODY, caller
from fl_server.metrics import Metrics
from fl_server.settings.security import EnrollmentConfig
from protos.fl.v1 import enrollment_pb2 as pb
from protos.fl.v1 import enrollment_pb2_grpc
from protos.wire import timestamp

log = structlog.get_logger()

HOLD_S = 10.0
"""Longest wait in a call for its turn."""
MOST_ADDRESSES = 4096
"""Addresses that are remembered; of more, the one that has called least recently is dropped."""


Context = grpc.aio.ServicerContext[Any, Any]


class EnrollmentRates:
    """The limits of one port. Clocks are arguments, in seconds of a monotonic clock."""

    def __init__(self, config: EnrollmentConfig) -> None:
        self._all = TokenBucket(max(1.0, config.requests_per_s), config.requests_per_s)
        self._requests = TokenBuckets(config.address_requests_per_s, 1.0, MOST_ADDRESSES)
        self._failures = TokenBuckets(config.address_failures_per_min, 60.0, MOST_ADDRESSES)

    def wait(self, address: str, now: float) -> float:
        """Count a request. Returns the seconds until its turn, at most HOLD_S. Raises TooMany.

        address: host:port of the caller.
        """
        network = network_of(address)
        if left := self._failures.of(network).take(0.0, now):
            raise TooMany("too many refused requests for certificates from this address", left, routine=True)
        own = self._requests.of(network)
        waits = {"from this address": own.spend(1.0, now), "in all": self._all.spend(1.0, now)}
        whose = max(waits, key=lambda limit: waits[limit])
        if (wait := waits[whose]) > HOLD_S:
            for bucket in (own, self._all):
                bucket.spend(-1.0, now)
            raise TooMany(f"too many requests for certificates {whose}", wait, routine=True)
        return wait

    def failed(self, address: str, now: float) -> None:
        """Count a refused request."""
        self._failures.of(network_of(address)).spend(1.0, now)


class EnrollmentService(enrollment_pb2_grpc.EnrollmentServicer):
    """The service for devices without a valid certificate, on `enroll_listen`."""

    def __init__(self, issuer: Issuer, metrics: Metrics, audit: AuditLog) -> None:
        self._issuer, self._metrics, self._audit = issuer, metrics, audit
        self._rates = EnrollmentRates(issuer.config)

    async def Enroll(self, request: pb.EnrollRequest, context: Context) -> pb.EnrollResponse:
        """A certificate for a token."""
        enrolling = partial(self._issuer.enroll, request.token, request.csr, request.name)
        issued = await self._limited(enrolling, "enrolled")
        return pb.EnrollResponse(issued=_message(self._issuer, issued))

    async def Reenroll(self, request: pb.ReenrollRequest, context: Context) -> pb.ReenrollResponse:
        """A certificate for one that has expired."""
        enrolling = partial(self._issuer.reenroll, request.certificate, request.csr, request.signature)
        issued = await self._limited(enrolling, "reenrolled")
        return pb.ReenrollResponse(issued=_message(self._issuer, issued))

    async def _limited(self, work: Callable[[], Awaitable[Issued]], why: Literal["enrolled", "reenrolled"]) -> Issued:
        """Do the work in its turn, and count its result."""
        address = identity.address.get()
        try:
            await asyncio.sleep(self._rates.wait(address, time.monotonic()))
            async with self._issuer.turns:
                issued = await work()
        except ServerError as error:
            result = _result_of(error)
            self._metrics.enrollments.labels(result).inc()
            if result not in {"limited", "failed"}:
                self._rates.failed(address, time.monotonic())
                log.info("enrollment_refused", peer=network_of(address), error=str(error))
            raise
        self._metrics.enrollments.labels("repeated" if issued.again else "issued").inc()
        if not issued.again:
            self._metrics.certificates_issued.labels(why).inc()
        await _record(self._audit, issued, "Enroll" if why == "enrolled" else "Reenroll")
        return issued


class CertificatesService(enrollment_pb2_grpc.CertificatesServicer):
    """The service for devices with a valid certificate, on `listen`."""

    def __init__(self, issuer: Issuer | None, metrics: Metrics, audit: AuditLog) -> None:
        """issuer: None if the coordinator signs no certificates."""
        self._issuer, self._metrics, self._audit = issuer, metrics, audit
        self._per_min = 0.0 if issuer is None else issuer.config.renewals_per_min
        self._rate = TokenBuckets(self._per_min, 60.0)

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        """A certificate with the name of the caller's."""
        who = caller.get()
        if self._issuer is None:
            raise NotConfigured("the renewal of certificates", "[enrollment]")
        if who is ANYBODY:
            raise Forbidden("", "a client's certificate")
        if wait := self._rate.of(who.name).take(1.0, time.monotonic()):
            raise LimitExceeded(f"{self._per_min:g} renewals a minute (enrollment.renewals_per_min)", wait)
        async with self._issuer.turns:
            issued = await self._issuer.renew(who, request.csr)
        self._metrics.certificates_issued.labels("renewed").inc()
        await _record(self._audit, issued, "Renew")
        return pb.RenewResponse(issued=_message(self._issuer, issued))


async def _record(audit: AuditLog, issued: Issued, method: str) -> None:
    """Log an issued certificate, and add a row to the audit log. The device waits for the row for some seconds."""
    record, who, address = issued.record, caller.get(), identity.address.get()
    token = f"token {record.enrollment_id}, " if record.enrollment_id else ""
    detail = f"{token}serial {record.serial}{', issued before' if issued.again else ''}"
    log.info("certificate_issued", client=record.name, serial=record.serial, rpc=method, again=issued.again)
    actor = "anybody" if who is ANYBODY else str(who)
    await audit.record_in_time(AuditRecord(actor, address, method, record.name, "ok", detail))


def _result_of(error: ServerError) -> str:
    """The label in metrics of a request without a certificate."""
    if isinstance(error, NotEnrolled):
        return error.why
    if isinstance(error, TooMany):
        return "limited"
    if isinstance(error, InvalidInput):
        return "csr"
    return "banned" if isinstance(error, Forbidden) else "failed"


def _message(issuer: Issuer, issued: Issued) -> pb.IssuedCertificate:
    record = issued.record
    return pb.IssuedCertificate(
        chain=issuer.authority.chain(record.content),
        authority=issuer.authority.server_authorities(),
        name=record.name,
        labels=issued.labels,
        not_after=timestamp(record.not_after),
        renew_after=timestamp(issued.renew_after),
    )
