"""Enrollment tokens, id.secret, and what operators do with them. The ledger has the id and a hash of the secret.

A secret has 256 random bits, so nobody can find it by trying, whatever the hash costs. A slow hash protects secrets
that people choose; here it would only let strangers keep the coordinator busy. SHA-256 is enough.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fl_common.names import check_id
from fl_server.errors import InvalidInput, NoSuchToken, NotEnrolled, one_line
from fl_server.store.certificates import EnrollmentRecord
from fl_server.store.ledger import Ledger
from fl_server.store.records import HistoryRecord

_SECRET_BYTES = 32
_FORM = re.compile(r"([0-9a-f]{16})\.([A-Za-z0-9_-]{43})")
MOST_TOKENS = 1000
"""Most tokens that one call makes."""
MOST_USES = 100_000
_MOST_LABELS, _LABEL_CHARS = 64, 256
_LONGEST_TTL_S = 31_536_000.0


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
    parts = _FORM.fullmatch(text)
    if parts is None:
        raise NotEnrolled("token", "a token as `fl enroll create` prints it: 16 characters, a dot, 43 characters")
    return Token(parts[1], parts[2])


@dataclass(frozen=True, slots=True)
class TokenSpec:
    """A token to make: with a name, or with a prefix of names."""

    name: str
    prefix: str
    uses: int
    """0: one."""
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token with its secret, for the response of one call."""

    record: EnrollmentRecord
    token: Token


def state_of(token: EnrollmentRecord, now: float) -> str:
    """One of "open", "used", "expired", "revoked"."""
    if token.revoked:
        return "revoked"
    if not token.uses_left:
        return "used"
    return "expired" if token.expires_at <= now else "open"


class TokenActions:
    """Actions on the tokens of one coordinator. `actor` is the operator, as history shows it."""

    def __init__(self, ledger: Ledger, default_ttl_s: float) -> None:
        self._ledger, self._default_ttl_s = ledger, default_ttl_s

    async def create(self, specs: Sequence[TokenSpec], ttl_s: float, actor: str) -> list[NewToken]:
        """Make tokens, all or none, in the order of the specs. ttl_s: 0 for the default. Raises InvalidInput."""
        if not 1 <= len(specs) <= MOST_TOKENS:
            raise InvalidInput("specs", f"1 to {MOST_TOKENS:,} tokens in one call", len(specs))
        if not 0 <= ttl_s <= _LONGEST_TTL_S:
            raise InvalidInput("ttl_s", f"0 to {_LONGEST_TTL_S:g} seconds", ttl_s)
        for number, spec in enumerate(specs):
            _check(spec, f"specs[{number}]")
        now = time.time()
        made = [_new(spec, (now, now + (ttl_s or self._default_ttl_s)), actor) for spec in specs]
        whys = [
            HistoryRecord(now, actor, "enrollment_created", token.record.name, f"token {token.record.id}")
            for token in made
        ]
        await self._ledger.do(self._ledger.store.add_enrollments, [token.record for token in made], whys)
        return made

    async def revoke(self, enrollment_id: str, reason: str, actor: str) -> EnrollmentRecord:
        """Make a token useless. Raises NoSuchToken."""
        why = HistoryRecord(time.time(), actor, "enrollment_revoked", enrollment_id[:32], one_line(reason))
        revoked = await self._ledger.do(self._ledger.store.revoke_enrollment, enrollment_id[:32], why)
        if revoked is None:
            raise NoSuchToken(enrollment_id)
        return revoked


def _new(spec: TokenSpec, times: tuple[float, float], actor: str) -> NewToken:
    token, uses = new_token(), spec.uses or 1
    record = EnrollmentRecord(
        id=token.id,
        secret_hash=token.secret_hash,
        name=spec.name or spec.prefix,
        prefix=bool(spec.prefix),
        labels=dict(spec.labels),
        uses=uses,
        uses_left=uses,
        created_at=times[0],
        expires_at=times[1],
        actor=actor,
    )
    return NewToken(record, token)


def _check(spec: TokenSpec, where: str) -> None:
    """Raises InvalidInput for a token that cannot be made."""
    if bool(spec.name) == bool(spec.prefix):
        raise InvalidInput(where, "a name or a name_prefix", "both" if spec.name else "neither")
    try:
        check_id("name" if spec.name else "name_prefix", spec.name or spec.prefix)
    except ValueError as error:
        raise InvalidInput(where, "a valid client id", error) from None
    if spec.uses > 1 and spec.name:
        raise InvalidInput(f"{where}.uses", "1 for a token with a name: a second device would take the name", spec.uses)
    if spec.uses > MOST_USES:
        raise InvalidInput(f"{where}.uses", f"at most {MOST_USES:,}", spec.uses)
    texts = (*spec.labels.keys(), *spec.labels.values())
    if len(spec.labels) > _MOST_LABELS or any(len(text) > _LABEL_CHARS or not text.isprintable() for text in texts):
        limits = f"at most {_MOST_LABELS} labels of at most {_LABEL_CHARS} printable characters"
        raise InvalidInput(f"{where}.labels", limits, f"{len(spec.labels)} labels")
