"""Enrollment tokens, certificates and revocations: their records, and the ledger's tables of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import sqlalchemy as sa

from fl_server.store.database import schema
from fl_server.store.database.schema import record_table
from fl_server.store.database.transactions import Transactions, find, rows_where, to_row, write_history
from fl_server.store.records import HistoryRecord

RevocationKind = Literal["serial", "key", "name"]
CERTIFICATES_KEPT_S = 7 * 86_400.0
"""How long a certificate is kept after its end at least. The audit log has the others."""
Position = tuple[float, str]
"""Time and id of the last entry of a page."""
TOKENS_KEPT_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class EnrollmentRecord:
    """A token, without its secret."""

    id: str
    secret_hash: bytes = field(repr=False)
    """SHA-256 of the secret."""
    name: str
    """The name in the certificate; with `prefix`, its beginning."""
    prefix: bool
    labels: Mapping[str, str]
    uses: int
    """Certificates in all."""
    uses_left: int
    created_at: float
    """Unix seconds, as all times here."""
    expires_at: float
    actor: str
    """The creator."""
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class CertificateRecord:
    """An issued certificate."""

    serial: str
    """The serial number in hex, without leading zeros."""
    role: str
    name: str
    key: str
    """SHA-256 of the public key (SubjectPublicKeyInfo, DER) in hex."""
    issued_at: float
    not_before: float
    not_after: float
    enrollment_id: str
    """The token that it was issued for; empty for a renewal."""
    content: bytes = field(repr=False)
    """The certificate, DER."""
    renewed_from: str = ""
    """Serial of the certificate that its holder proved for it; empty: it was issued for a token."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The labels of the token at the begin of the chain of renewals."""


@dataclass(frozen=True, slots=True)
class RevocationRecord:
    """Denied certificates."""

    kind: RevocationKind
    """"serial" and "key": each certificate with it, of any authority. "name": each certificate of this client that
    begins at or before `revoked_at`."""
    value: str
    name: str
    """The holder's name, if it is known."""
    revoked_at: float
    actor: str
    reason: str


_ID, _NAME, _SERIAL = sa.String(32), sa.String(64), sa.String(64)
enrollments = record_table(
    "enrollments",
    EnrollmentRecord,
    ("id",),
    (),
    sa.Index("enrollments_by_time", "created_at", "id"),
    id=_ID,
    name=_NAME,
)
certificates = record_table(
    "certificates",
    CertificateRecord,
    ("serial",),
    (),
    sa.Index("certificates_by_name", "name", "issued_at"),
    sa.Index("certificates_by_time", "issued_at", "serial"),
    sa.Index("certificates_by_key", "key"),
    sa.Index("certificates_by_token", "enrollment_id"),
    sa.Index("certificates_by_parent", "renewed_from"),
    serial=_SERIAL,
    role=sa.String(16),
    name=_NAME,
    key=sa.String(64),
    enrollment_id=_ID,
    renewed_from=_SERIAL,
)
revocations = record_table(
    "revocations", RevocationRecord, ("kind", "value"), kind=sa.String(8), value=sa.String(64), name=_NAME
)


def of_renewed(row: RevocationRecord, certificate: CertificateRecord) -> RevocationRecord:
    """The revocation of a certificate that was renewed from a revoked one."""
    reason = f"{row.reason} (renewed from {row.kind} {row.value})".strip()
    return RevocationRecord("serial", certificate.serial, certificate.name, row.revoked_at, row.actor, reason)


class NotSpent(StrEnum):
    """Why a token gave no certificate."""

    USED = "used"
    """Its certificates were issued, to other keys."""
    EXPIRED = "expired"
    REVOKED = "revoked"
    KEY = "key"
    """The same token gave the same key a certificate of another name."""
    NAME = "name"
    """The name has a valid certificate with another key."""
    OLDER = "older"
    """A certificate of this name was revoked after the token was made."""


class CertificateLedger(Transactions):
    """The part of the `Store` for certificates."""

    def add_enrollments(self, enrollments_: Sequence[EnrollmentRecord], whys: Sequence[HistoryRecord]) -> None:
        """Add tokens. Removes those that ended long before."""
        with self._transaction("write enrollment tokens") as db:
            long_ago = max(record.created_at for record in enrollments_) - TOKENS_KEPT_S
            db.execute(sa.delete(enrollments).where(enrollments.c.expires_at < long_ago))
            db.execute(sa.insert(enrollments), [to_row(record) for record in enrollments_])
            write_history(db, *whys)

    def enrollment(self, enrollment_id: str) -> EnrollmentRecord | None:
        """One token, if there is one."""
        tokens = self._rows("an enrollment token", enrollments, id=enrollment_id)
        return EnrollmentRecord(**tokens[0]) if tokens else None

    def enrollments(self, after: Position | None, limit: int) -> list[EnrollmentRecord]:
        """At most `limit` tokens, the newest first, after (created_at, id)."""
        tokens = self._newest(enrollments, ("created_at", "id"), after, limit)
        return [EnrollmentRecord(**row) for row in tokens]

    def revoke_enrollment(self, enrollment_id: str, why: HistoryRecord) -> EnrollmentRecord | None:
        """Make a token useless; fsynced. Returns the token; None if there is none. No history the second time."""
        still = enrollments.c.revoked.is_(False)
        with self._transaction(f"revoke the token {enrollment_id!r}", fsynced=True) as db:
            if db.execute(
                sa.update(enrollments).filter_by(id=enrollment_id).where(still).values(revoked=True)
            ).rowcount:
                write_history(db, why)
            token = find(db, enrollments, id=enrollment_id)
            return EnrollmentRecord(**token) if token else None

    def spend(
        self, certificate: CertificateRecord, why: HistoryRecord, kept_s: float = CERTIFICATES_KEPT_S
    ) -> CertificateRecord | NotSpent:
        """Spend one use of the certificate's token and keep the certificate, together; fsynced.

        A token that gave this key a certificate of this name before, which is still valid, gives the same one again,
        without another use. `issued_at` is the current time. kept_s: as in `add_certificate`.
        """
        token_id, now = certificate.enrollment_id, certificate.issued_at
        with self._transaction(f"issue a certificate to {certificate.name!r}", fsynced=True) as db:
            token = find(db, enrollments, id=token_id)
            if token is None or token["revoked"]:
                return NotSpent.REVOKED
            earlier = rows_where(certificates, enrollment_id=token_id, key=certificate.key)
            if before := db.execute(earlier.where(certificates.c.not_after > now)).mappings().first():
                return CertificateRecord(**before) if before["name"] == certificate.name else NotSpent.KEY
            if _is_older(db, token, certificate):
                return NotSpent.OLDER
            # First, so that two transactions at once cannot both take the last use.
            left = enrollments.c.uses_left
            take = sa.update(enrollments).filter_by(id=token_id).where(left > 0).values(uses_left=left - 1)
            if token["expires_at"] <= now or not db.execute(take).rowcount:
                return NotSpent.EXPIRED if token["expires_at"] <= now else NotSpent.USED
            if token["prefix"] and _is_taken(db, certificate):
                db.execute(sa.update(enrollments).filter_by(id=token_id).values(uses_left=left + 1))
                return NotSpent.NAME
            _keep(db, certificate, kept_s)
            write_history(db, why)
            return certificate

    def add_certificate(
        self, certificate: CertificateRecord, parent_key: str = "", kept_s: float = CERTIFICATES_KEPT_S
    ) -> bool:
        """Keep a renewed certificate. Removes certificates of the name that ended more than `kept_s` before.

        parent_key: of the certificate that it was renewed from. False: that one is revoked, and nothing is kept.
        """
        by = (("serial", certificate.renewed_from), ("key", parent_key))
        with self._transaction(f"write a certificate of {certificate.name!r}") as db:
            if db.execute(_denying(by)).first():
                return False
            _keep(db, certificate, kept_s)
            return True

    def certificates(self, name: str, after: Position | None, limit: int) -> list[CertificateRecord]:
        """At most `limit` certificates of a client ("" for all), the newest first, after (issued_at, serial)."""
        only = [certificates.c.name == name] if name else []
        newest = self._newest(certificates, ("issued_at", "serial"), after, limit, *only)
        return [CertificateRecord(**row) for row in newest]

    def certificates_with(self, kind: RevocationKind, value: str) -> list[CertificateRecord]:
        """All certificates with this serial, key or client's name, the newest first."""
        query = sa.select(certificates).where(certificates.c[kind] == value).order_by(certificates.c.issued_at.desc())
        if kind == "name":
            query = query.where(certificates.c.role == "client")
        return [CertificateRecord(**row) for row in self._read("certificates", query)]

    def certificates_never_presented(self, after: float) -> list[CertificateRecord]:
        """The newest certificate of each client that has attended with none, if it ends after this Unix time."""
        known = sa.select(schema.clients.c.client_id).where(schema.clients.c.certificate.is_not(None))
        columns = certificates.c
        issued = sa.select(columns.name, sa.func.max(columns.issued_at).label("at")).where(columns.role == "client")
        newest = issued.where(columns.not_after > after, columns.name.not_in(known)).group_by(columns.name).subquery()
        query = sa.select(certificates).join(
            newest, sa.and_(columns.name == newest.c.name, columns.issued_at == newest.c.at)
        )
        return [CertificateRecord(**row) for row in self._read("certificates", query)]

    def revoke(self, revocations_: Sequence[RevocationRecord], why: HistoryRecord) -> list[CertificateRecord]:
        """Deny certificates; fsynced. Returns those that were renewed from them: they are denied by their serials.

        A second revocation of a serial or key changes nothing. A second one of a name replaces the first.
        """
        renewed: list[CertificateRecord] = []
        with self._transaction("write revocations", fsynced=True) as db:
            for revocation in revocations_:
                _deny(db, revocation)
                # A name denies all of its certificates until now by itself.
                renewed_from = [] if revocations_[0].kind == "name" else _renewed_from(db, revocation)
                for certificate in renewed_from:
                    _deny(db, of_renewed(revocation, certificate))
                renewed += renewed_from
            write_history(db, why)
        return renewed

    def revocations(self) -> list[RevocationRecord]:
        """All revocations, the newest first."""
        order = revocations.c.revoked_at.desc(), revocations.c.kind, revocations.c.value
        return [RevocationRecord(**row) for row in self._read("revocations", sa.select(revocations).order_by(*order))]

    def revocations_alone(self, name: str, after: Position | None, limit: int) -> list[RevocationRecord]:
        """Revocations of serials and keys that no certificate of the ledger has, of a holder ("" for all).

        At most `limit`, the newest first, after (revoked_at, value).
        """
        value = revocations.c.value
        known = sa.exists().where(sa.or_(certificates.c.serial == value, certificates.c.key == value))
        only = [revocations.c.kind != "name", ~known, *([revocations.c.name == name] if name else [])]
        newest = self._newest(revocations, ("revoked_at", "value"), after, limit, *only)
        return [RevocationRecord(**row) for row in newest]

    def _newest(
        self, table: sa.Table, key: tuple[str, str], after: Position | None, limit: int, *only: sa.ColumnElement[bool]
    ) -> list[Any]:
        """Rows in descending order of a time and an id."""
        time, name = table.c[key[0]], table.c[key[1]].collate(self._byte_order)
        query = sa.select(table).where(*only).order_by(time.desc(), name.desc()).limit(limit)
        if after is not None:
            query = query.where(sa.or_(time < after[0], sa.and_(time == after[0], name < after[1])))
        return self._read(table.name, query)


def _keep(db: sa.Connection, certificate: CertificateRecord, kept_s: float) -> None:
    """Add a certificate, and remove old ones of its name."""
    long_ago = certificate.issued_at - kept_s
    db.execute(sa.delete(certificates).filter_by(name=certificate.name).where(certificates.c.not_after < long_ago))
    db.execute(sa.insert(certificates), to_row(certificate))


def _is_older(db: sa.Connection, token: sa.RowMapping, wanted: CertificateRecord) -> bool:
    """Whether a certificate of the name was revoked since the token was made."""
    revoked = sa.select(revocations.c.revoked_at).filter_by(name=wanted.name)
    return db.execute(revoked.where(revocations.c.revoked_at >= token["created_at"])).first() is not None


def _deny(db: sa.Connection, row: RevocationRecord) -> None:
    """Write a revocation. One of a name replaces an earlier one; others stay as they are."""
    place = {"kind": row.kind, "value": row.value}
    if row.kind == "name":
        db.execute(sa.delete(revocations).filter_by(**place))
    elif find(db, revocations, **place):
        return
    db.execute(sa.insert(revocations), to_row(row))


def _renewed_from(db: sa.Connection, row: RevocationRecord) -> list[CertificateRecord]:
    """The certificates in the chains of renewals that begin with a serial or key."""
    begin = sa.select(certificates.c.serial).where(certificates.c[row.kind] == row.value)
    renewals: dict[str, CertificateRecord] = {}
    parents = {row.value} if row.kind == "serial" else set(db.execute(begin).scalars())
    while parents:
        chosen = sa.select(certificates).where(certificates.c.renewed_from.in_(parents))
        renewed = [CertificateRecord(**values) for values in db.execute(chosen).mappings()]
        parents = {certificate.serial for certificate in renewed} - set(renewals)
        renewals |= {certificate.serial: certificate for certificate in renewed}
    return list(renewals.values())


def _denying(by: Sequence[tuple[str, str]]) -> sa.Select[Any]:
    """The revocations with these kinds and values."""
    return sa.select(revocations).where(sa.tuple_(revocations.c.kind, revocations.c.value).in_(by))


def _is_taken(db: sa.Connection, wanted: CertificateRecord) -> bool:
    """Whether the name has a certificate with another key that is valid now and not revoked."""
    valid = certificates.c.not_after > wanted.issued_at
    others = rows_where(certificates, name=wanted.name, role=wanted.role).where(valid, certificates.c.key != wanted.key)
    for other in db.execute(others).mappings():
        by = (("serial", other["serial"]), ("key", other["key"]), ("name", other["name"]))
        denials = db.execute(_denying(by)).mappings().all()
        if not any(row["kind"] != "name" or other["not_before"] <= row["revoked_at"] for row in denials):
            return True
    return False
