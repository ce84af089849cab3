"""Enrollment tokens: id.secret. The ledger has the id and a hash of the secret.

A secret has 256 random bits, so nobody can find it by trying, whatever the hash costs. A slow hash protects secrets
that people choose; here it would only let strangers keep the coordinator busy. SHA-256 is enough.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field

from fl_server.errors import NotEnrolled
from fl_server.store.certificates import EnrollmentRecord

_SECRET_BYTES = 32
_FORM = re.compile(r"([0-9a-f]{16})\.([A-Za-z0-9_-]{43})")


@dataclass(frozen=True, slots=True)
class Token:
    """The two parts of a token."""

    id: str
    secret: str = field(repr=False)

    def __str__(self) -> str:
        return f"{self.id}.***"

    @property
    def text(self) -> str:
        """The token for its device. It must not be logged."""
        return f"{self.id}.{self.secret}"

    @property
    def secret_hash(self) -> bytes:
        """SHA-256 of the secret."""
        return hashlib.sha256(self.secret.encode()).digest()

    def opens(self, record: EnrollmentRecord | None) -> bool:
        """Whether the record is of this token. Takes the same time for each wrong secret."""
        known = bytes(hashlib.sha256().digest_size) if record is None else record.secret_hash
        return hmac.compare_digest(self.secret_hash, known) and record is not None


def new_token() -> Token:
    """A random token."""
    return Token(secrets.token_hex(8), secrets.token_urlsafe(_SECRET_BYTES))


def parse_token(text: str) -> Token:
    """The parts of a token. Raises NotEnrolled for other text, which the message does not repeat."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise NotEnrolled("token", "a token as `fl enroll create` prints it: 16 characters, a dot, 43 characters")
    return Token(found[1], found[2])
