"""The calls about certificates: of operators for tokens, certificates and revocations, and of devices for their own.

Devices without a certificate call Enrollment, and those with one Certificates. At `enroll_listen`, where callers have
no name, requests are limited for each address and for the whole port. An address that only guesses is stopped by its
failures, and does not reach the limit of the port.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import structlog

from fl_common.certificates.names import hosts_of
from fl_common.rate_limits import TokenBucket, TokenBuckets, network_of
from fl_common.settings import is_loopback, split_address
from fl_server import identity
from fl_server.audit.log import AuditLog, AuditRecord
from fl_server.enrollment.grants import Revocations, TokenActions, TokenSpec, state_of
from fl_server.enrollment.issuing import Issued, Issuer
from fl_server.errors import Forbidden, InvalidInput, LimitExceeded, NotConfigured, NotEnrolled, ServerError, TooMany
from fl_server.identity import ANYBODY, actor, caller
from fl_server.metrics import Metrics
from fl_server.pages import Cursor, Entries, Position
from fl_server.settings.config import ServerConfig
from fl_server.settings.sections import EnrollmentConfig
from fl_server.store.database.ledger_certificates import (
    CertificateRecord,
    EnrollmentRecord,
    RevocationKind,
    RevocationRecord,
)
from fl_server.store.ledger import Ledger
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import enrollment_pb2 as device_pb
from protos.fl.v1 import enrollment_pb2_grpc
from protos.wire import filled, timestamp

log = structlog.get_logger()

HOLD_S = 10.0
"""Longest wait in a call for its turn."""
MOST_ADDRESSES = 4096
"""Addresses that are remembered; of more, the one that has called least recently is dropped."""

Context = grpc.aio.ServicerContext[Any, Any]
_ISSUED, _FOREIGN = 0, 1
"""First part of a position in the list of certificates: those of the ledger, then other revoked ones."""


class EnrollmentCalls:
    """Operators' calls about tokens and certificates, as the Admin service has them."""

    def __init__(  # noqa: PLR0913, PLR0917 - what these calls need
        self,
        config: ServerConfig,
        ledger: Ledger,
        issuer: Issuer | None,
        revocations: Revocations,
        bound: Mapping[str, str],
    ) -> None:
        """bound: the open ports, host:port, by the setting's name."""
        self._config, self._ledger, self._issuer, self._revocations = config, ledger, issuer, revocations
        settings, self._bound = config.enrollment, bound
        self._tokens = TokenActions(ledger, 0.0 if settings is None else settings.token_ttl_s)

    async def CreateEnrollments(
        self, request: pb.CreateEnrollmentsRequest, context: Context
    ) -> pb.CreateEnrollmentsResponse:
        """Make tokens for devices."""
        config, issuer = self._config, self._issuer
        if issuer is None or config.enroll_listen is None:
            raise NotConfigured("enrollment", "enroll_listen and [enrollment]")
        specs = [TokenSpec(spec.name, spec.name_prefix, spec.uses, dict(spec.labels)) for spec in request.specs]
        made = await self._tokens.create(specs, request.ttl_s, actor())
        created = [pb.CreatedEnrollment(enrollment=_token(new.record), token=new.token.text) for new in made]
        client, enrollment = dialed(config, self._bound, hosts_of(issuer.authority.presented().leaf))
        return pb.CreateEnrollmentsResponse(
            created=created,
            ca_fingerprint=issuer.authority.fingerprint(),
            client_address=client,
            enroll_address=enrollment,
        )

    async def ListEnrollments(self, request: pb.ListEnrollmentsRequest, context: Context) -> pb.ListEnrollmentsResponse:
        """A page of tokens, the newest first."""
        ledger = self._ledger
        cursor = Cursor.of_request(request, (float, str), "enrollments")

        async def read(after: Position | None, count: int) -> Entries[pb.EnrollmentToken]:
            tokens = await ledger.do(ledger.store.enrollments, None if after is None else (after[0], after[1]), count)
            return [((token.created_at, token.id), _token(token)) for token in tokens]

        page = await cursor.page(read)
        return pb.ListEnrollmentsResponse(enrollments=page.entries, next_page_token=page.next_token)

    async def RevokeEnrollment(
        self, request: pb.RevokeEnrollmentRequest, context: Context
    ) -> pb.RevokeEnrollmentResponse:
        """Make a token useless."""
        token = await self._tokens.revoke(request.id, request.reason, actor())
        return pb.RevokeEnrollmentResponse(enrollment=_token(token))

    async def ListCertificates(
        self, request: pb.ListCertificatesRequest, context: Context
    ) -> pb.ListCertificatesResponse:
        """A page of certificates, the newest first; then revoked ones that are not in the ledger."""
        ledger, name = self._ledger, request.name[:64]
        cursor = Cursor.of_request(request, (int, float, str), "certificates", name)

        async def read(after: Position | None, count: int) -> Entries[pb.CertificateStatus]:
            entries: list[tuple[Position, pb.CertificateStatus]] = []
            if after is None or after[0] == _ISSUED:
                place = None if after is None else (after[1], after[2])
                certificates = await ledger.do(ledger.store.certificates, name, place, count)
                entries = [((_ISSUED, each.issued_at, each.serial), self._certificate(each)) for each in certificates]
            if len(entries) < count:
                place = (after[1], after[2]) if after is not None and after[0] == _FOREIGN else None
                alone = await ledger.do(ledger.store.revocations_alone, name, place, count - len(entries))
                entries += [((_FOREIGN, row.revoked_at, row.value), _revoked(row)) for row in alone]
            return entries

        page = await cursor.page(read)
        return pb.ListCertificatesResponse(certificates=page.entries, next_page_token=page.next_token)

    async def revoke_certificates(self, request: pb.RevokeCertificatesRequest) -> pb.RevokeCertificatesResponse:
        """Deny certificates."""
        given: dict[RevocationKind, str] = {"name": request.name, "serial": request.serial, "key": request.key}
        chosen = [kind for kind, value in given.items() if value]
        if len(chosen) != 1:
            raise InvalidInput("name", "exactly one of name, serial and key", " and ".join(chosen) or "none")
        done = await self._revocations.revoke(chosen[0], given[chosen[0]], request.reason, actor())
        known = [self._certificate(record) for record in done.certificates]
        return pb.RevokeCertificatesResponse(revoked=known or [_revoked(done.rows[0])])

    def _certificate(self, record: CertificateRecord) -> pb.CertificateStatus:
        issued, end = timestamp(record.issued_at), timestamp(record.not_after)
        row = self._revocations.of_record(record)
        why = {} if row is None else {"revoked": timestamp(row.revoked_at), "reason": row.reason}
        return filled(pb.CertificateStatus, record, issued=issued, not_after=end, **why)


def _revoked(row: RevocationRecord) -> pb.CertificateStatus:
    """A revoked certificate that the ledger does not have."""
    value: dict[str, Any] = {} if row.kind == "name" else {row.kind: row.value}
    return pb.CertificateStatus(name=row.name, revoked=timestamp(row.revoked_at), reason=row.reason, **value)


def _token(record: EnrollmentRecord) -> pb.EnrollmentToken:
    name = {"name_prefix" if record.prefix else "name": record.name}
    spec = pb.EnrollmentSpec(uses=record.uses, labels=record.labels, **name)
    created, expires = timestamp(record.created_at), timestamp(record.expires_at)
    state = state_of(record, time.time())
    return filled(pb.EnrollmentToken, record, spec=spec, created=created, expires=expires, state=state)


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

    async def Enroll(self, request: device_pb.EnrollRequest, context: Context) -> device_pb.EnrollResponse:
        """A certificate for a token."""
        async with self._turn():
            issued = await self._issuer.enroll(request.token, request.csr, request.name)
        return device_pb.EnrollResponse(issued=await self._given(issued, "enrolled", "Enroll"))

    async def Reenroll(self, request: device_pb.ReenrollRequest, context: Context) -> device_pb.ReenrollResponse:
        """A certificate for one that has expired."""
        async with self._turn():
            issued = await self._issuer.reenroll(request.certificate, request.csr, request.signature)
        return device_pb.ReenrollResponse(issued=await self._given(issued, "reenrolled", "Reenroll"))

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for the request's turn, and count a request that gets no certificate."""
        address = identity.address.get()
        try:
            await asyncio.sleep(self._rates.wait(address, time.monotonic()))
            async with self._issuer.turns:
                yield
        except ServerError as error:
            result = _result_of(error)
            self._metrics.enrollments.labels(result).inc()
            if result not in {"limited", "failed"}:
                self._rates.failed(address, time.monotonic())
                log.info("enrollment_refused", peer=network_of(address), error=str(error))
            raise

    async def _given(self, issued: Issued, why: str, method: str) -> device_pb.IssuedCertificate:
        """Count and record a certificate that a device gets."""
        self._metrics.enrollments.labels("repeated" if issued.again else "issued").inc()
        if not issued.again:
            self._metrics.certificates_issued.labels(why).inc()
        await _record(self._audit, issued, method)
        return _message(self._issuer, issued)


class CertificatesService(enrollment_pb2_grpc.CertificatesServicer):
    """The service for devices with a valid certificate, on `listen`."""

    def __init__(self, issuer: Issuer | None, metrics: Metrics, audit: AuditLog) -> None:
        """issuer: None if the coordinator signs no certificates."""
        self._issuer, self._metrics, self._audit = issuer, metrics, audit
        self._per_min = 0.0 if issuer is None else issuer.config.renewals_per_min
        self._rate = TokenBuckets(self._per_min, 60.0)

    async def Renew(self, request: device_pb.RenewRequest, context: Context) -> device_pb.RenewResponse:
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
        return device_pb.RenewResponse(issued=_message(self._issuer, issued))


async def _record(audit: AuditLog, issued: Issued, method: str) -> None:
    """Log an issued certificate, and add a row to the audit log. The device waits for the row for some seconds."""
    record, who, address = issued.record, caller.get(), identity.address.get()
    token = f"token {record.enrollment_id}, " if record.enrollment_id else ""
    detail = f"{token}serial {record.serial}{', issued before' if issued.again else ''}"
    log.info("certificate_issued", client=record.name, serial=record.serial, rpc=method, again=issued.again)
    by = "anybody" if who is ANYBODY else str(who)
    await audit.record_in_time(AuditRecord(by, address, method, record.name, "ok", detail))


def _result_of(error: ServerError) -> str:
    """The label in metrics of a request without a certificate."""
    if isinstance(error, NotEnrolled):
        return error.why
    if isinstance(error, TooMany):
        return "limited"
    if isinstance(error, InvalidInput):
        return "csr"
    return "banned" if isinstance(error, Forbidden) else "failed"


def _message(issuer: Issuer, issued: Issued) -> device_pb.IssuedCertificate:
    record = issued.record
    return device_pb.IssuedCertificate(
        chain=issuer.authority.chain(record.content),
        authority=issuer.authority.server_authorities(),
        name=record.name,
        labels=issued.labels,
        not_after=timestamp(record.not_after),
        renew_after=timestamp(issued.renew_after),
    )


def dialed(config: ServerConfig, bound: Mapping[str, str], names: Sequence[str]) -> tuple[str, str]:
    """The addresses host:port for clients and for enrollment.

    The settings' own come first. Otherwise the port is the one that is open, and the host is one that the certificate
    has, so that a device's check of it succeeds. The host is empty if nothing names it.

    Args:
        config: the settings.
        bound: the open ports, host:port, by the setting's name.
        names: the hosts of the coordinator's certificate.
    """
    given = {"listen": config.client_address, "enroll_listen": config.enroll_address}
    hosts = [split_address(address)[0] for address in given.values() if address]
    hosts += [name for name in names if not is_loopback(name) and not name.startswith("*")]
    client, enrollment = (
        address or _address(bound.get(port) or str(getattr(config, port)), hosts, names)
        for port, address in given.items()
    )
    return client, enrollment


def _address(bound: str, hosts: Sequence[str], names: Sequence[str]) -> str:
    host, port = split_address(bound)
    if host not in names and not is_loopback(host):
        host = hosts[0] if hosts else ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
