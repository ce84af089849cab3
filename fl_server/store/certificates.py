"""What the ledger keeps of enrollment tokens, certificates and revocations, and the part of its interface for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

from fl_server.store.records import HistoryRecord

RevocationKind = Literal["serial", "key", "name"]


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
    """In hex, without leading zeros."""
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
    """Of the token at the begin of the chain of renewals."""


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


Position = tuple[float, str]
"""Time and id of the last entry of a page."""


class CertificateStore(Protocol):
    """The part of the ledger for certificates. Each method is one transaction, as in `Store`."""

    def add_enrollments(self, enrollments: Sequence[EnrollmentRecord], whys: Sequence[HistoryRecord]) -> None:
        """Add tokens. Removes those that ended long before."""
        ...

    def enrollment(self, enrollment_id: str) -> EnrollmentRecord | None:
        """One token, if there is one."""
        ...

    def enrollments(self, after: Position | None, limit: int) -> list[EnrollmentRecord]:
        """At most `limit` tokens, the newest first, after (created_at, id)."""
        ...

    def revoke_enrollment(self, enrollment_id: str, why: HistoryRecord) -> EnrollmentRecord | None:
        """Make a token useless; fsynced. Returns the token; None if there is none. No history the second time."""
        ...

    def spend(self, certificate: CertificateRecord, why: HistoryRecord) -> CertificateRecord | NotSpent:
        """Spend one use of the certificate's token and keep the certificate, together; fsynced.

        A token that gave this key a certificate of this name before, which is still valid, gives the same one again,
        without another use. `issued_at` is the current time.
        """
        ...

    def add_certificate(self, certificate: CertificateRecord, parent_key: str = "") -> bool:
        """Keep a renewed certificate. Removes certificates of the name that ended long before.

        parent_key: of the certificate that it was renewed from. False: that one is revoked, and nothing is kept.
        """
        ...

    def certificates(self, name: str, after: Position | None, limit: int) -> list[CertificateRecord]:
        """At most `limit` certificates of a client ("" for all), the newest first, after (issued_at, serial)."""
        ...

    def certificates_with(self, kind: RevocationKind, value: str) -> list[CertificateRecord]:
        """All certificates with this serial, key or client's name, the newest first."""
        ...

    def revoke(self, revocations: Sequence[RevocationRecord], why: HistoryRecord) -> list[CertificateRecord]:
        """Deny certificates; fsynced. Returns those that were renewed from them: they are denied by their serials.

        A second revocation of a serial or key changes nothing. A second one of a name replaces the first.
        """
        ...

    def revocations(self) -> list[RevocationRecord]:
        """All revocations, the newest first."""
        ...

    def revocations_alone(self, name: str, after: Position | None, limit: int) -> list[RevocationRecord]:
        """Revocations of serials and keys that no certificate of the ledger has, of a holder ("" for all).

        At most `limit`, the newest first, after (revoked_at, value).
        """
        ...
