"""What the ledger keeps of enrollment tokens, certificates and revocations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

RevocationKind = Literal["serial", "key", "name"]
CERTIFICATES_KEPT_S = 7 * 86_400.0
"""How long a certificate is kept after its end at least. The audit log has the others."""


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
