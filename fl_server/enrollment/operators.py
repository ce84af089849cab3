"""Operators' calls for tokens, certificates and revocations, as messages."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fl_server.enrollment.issuing import Issuer
from fl_server.enrollment.revocations import Revocations
from fl_server.enrollment.tokens import TokenActions, TokenSpec, state_of
from fl_server.errors import InvalidInput, NotConfigured
from fl_server.pages import Cursor, Entries, Position
from fl_server.settings.config import ServerConfig
from fl_server.store.certificates import CertificateRecord, EnrollmentRecord, RevocationKind, RevocationRecord
from fl_server.store.ledger import Ledger
from protos.fl.v1 import admin_pb2 as pb
from protos.wire import timestamp

_ISSUED, _FOREIGN = 0, 1
"""First part of a position in the list of certificates: those of the ledger, then other revoked ones."""


class EnrollmentCalls:
    """Answers operators' calls about certificates."""

    def __init__(self, config: ServerConfig, ledger: Ledger, issuer: Issuer | None, revocations: Revocations) -> None:
        self._config, self._ledger, self._issuer, self._revocations = config, ledger, issuer, revocations
        settings = config.enrollment
        self._tokens = TokenActions(ledger, 0.0 if settings is None else settings.token_ttl_s)

    async def create(self, request: pb.CreateEnrollmentsRequest, actor: str) -> pb.CreateEnrollmentsResponse:
        """Make tokens."""
        config, issuer = self._config, self._issuer
        if issuer is None or config.enroll_listen is None:
            raise NotConfigured("enrollment", "enroll_listen and [enrollment]")
        specs = [TokenSpec(spec.name, spec.name_prefix, spec.uses, dict(spec.labels)) for spec in request.specs]
        made = await self._tokens.create(specs, request.ttl_s, actor)
        created = [pb.CreatedEnrollment(enrollment=_token(new.record), token=new.token.text) for new in made]
        return pb.CreateEnrollmentsResponse(
            created=created, ca_fingerprint=issuer.authority.fingerprint(), enroll_address=config.enroll_address or ""
        )

    async def list_tokens(self, request: pb.ListEnrollmentsRequest) -> pb.ListEnrollmentsResponse:
        """A page of tokens, the newest first."""
        ledger = self._ledger
        cursor = Cursor.of_request(request, (float, str), "enrollments")

        async def read(after: Position | None, count: int) -> Entries[pb.EnrollmentToken]:
            tokens = await ledger.do(ledger.store.enrollments, None if after is None else (after[0], after[1]), count)
            return [((token.created_at, token.id), _token(token)) for token in tokens]

        page = await cursor.page(read)
        return pb.ListEnrollmentsResponse(enrollments=page.entries, next_page_token=page.next_token)

    async def revoke_token(self, request: pb.RevokeEnrollmentRequest, actor: str) -> pb.RevokeEnrollmentResponse:
        """Make a token useless."""
        return pb.RevokeEnrollmentResponse(
            enrollment=_token(await self._tokens.revoke(request.id, request.reason, actor))
        )

    async def list_certificates(self, request: pb.ListCertificatesRequest) -> pb.ListCertificatesResponse:
        """A page of certificates, the newest first; then revoked ones that are not in the ledger."""
        ledger, name = self._ledger, request.name[:64]
        cursor = Cursor.of_request(request, (int, float, str), "certificates", name)

        async def read(after: Position | None, count: int) -> Entries[pb.CertificateStatus]:
            entries: list[tuple[Position, pb.CertificateStatus]] = []
            if after is None or after[0] == _ISSUED:
                place = None if after is None else (after[1], after[2])
                certificates = await ledger.do(ledger.store.certificates, name, place, count)
                entries = [
                    ((_ISSUED, record.issued_at, record.serial), self._status(record)) for record in certificates
                ]
            if len(entries) < count:
                place = (after[1], after[2]) if after is not None and after[0] == _FOREIGN else None
                alone = await ledger.do(ledger.store.revocations_alone, name, place, count - len(entries))
                entries += [((_FOREIGN, row.revoked_at, row.value), _revoked(row)) for row in alone]
            return entries

        page = await cursor.page(read)
        return pb.ListCertificatesResponse(certificates=page.entries, next_page_token=page.next_token)

    async def revoke_certificates(
        self, request: pb.RevokeCertificatesRequest, actor: str
    ) -> pb.RevokeCertificatesResponse:
        """Deny certificates."""
        given: list[tuple[RevocationKind, str]] = [
            ("name", request.name), ("serial", request.serial), ("key", request.key),
        ]  # fmt: skip
        chosen = [(kind, value) for kind, value in given if value]
        if len(chosen) != 1:
            came = " and ".join(kind for kind, _ in chosen) or "none"
            raise InvalidInput("name", "exactly one of name, serial and key", came)
        kind, value = chosen[0]
        done = await self._revocations.revoke(kind, value, request.reason, actor)
        known: Sequence[pb.CertificateStatus] = [self._status(record) for record in done.certificates]
        return pb.RevokeCertificatesResponse(revoked=known or [_revoked(done.rows[0])])

    def _status(self, record: CertificateRecord) -> pb.CertificateStatus:
        status = pb.CertificateStatus(
            serial=record.serial,
            role=record.role,
            name=record.name,
            key=record.key,
            issued=timestamp(record.issued_at),
            not_after=timestamp(record.not_after),
        )
        if (row := self._revocations.of_record(record)) is not None:
            status.revoked.CopyFrom(timestamp(row.revoked_at))
            status.reason = row.reason
        return status


def _revoked(row: RevocationRecord) -> pb.CertificateStatus:
    """A revoked certificate that the ledger does not have."""
    status = pb.CertificateStatus(name=row.name, revoked=timestamp(row.revoked_at), reason=row.reason)
    if row.kind == "serial":
        status.serial = row.value
    elif row.kind == "key":
        status.key = row.value
    return status


def _token(record: EnrollmentRecord) -> pb.EnrollmentToken:
    spec = pb.EnrollmentSpec(uses=record.uses, labels=record.labels)
    if record.prefix:
        spec.name_prefix = record.name
    else:
        spec.name = record.name
    return pb.EnrollmentToken(
        id=record.id,
        spec=spec,
        created=timestamp(record.created_at),
        expires=timestamp(record.expires_at),
        actor=record.actor,
        state=state_of(record, time.time()),
        uses_left=record.uses_left,
    )
