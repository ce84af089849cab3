"""What operators grant and deny: enrollment tokens, and revocations of certificates.

A token is id.secret. The ledger has the id and a hash of the secret. A secret has 256 random bits, so nobody can find
it by trying, whatever the hash costs. A slow hash protects secrets that people choose; here it would only let strangers
keep the coordinator busy. SHA-256 is enough. Revocations are in memory, because every call is checked, and in the
ledger.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fl_common.names import check_id
from fl_common.units import counted
from fl_server.errors import InvalidInput, NoSuchToken, NotEnrolled, one_line
from fl_server.identity import Identity
from fl_server.store.database.ledger_certificates import (
    CertificateRecord,
    EnrollmentRecord,
    RevocationKind,
    RevocationRecord,
    of_renewed,
)
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
            _check_spec(spec, f"specs[{number}]")
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


def _check_spec(spec: TokenSpec, where: str) -> None:
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
        raise InvalidInput(f"{where}.labels", limits, f"{counted(len(spec.labels), 'label')}")


_SERIAL = re.compile(r"[0-9a-f]{1,40}")
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Revoked:
    """The result of a revocation."""

    certificates: list[CertificateRecord]
    """Those of the ledger that are denied by it and have not ended."""
    rows: list[RevocationRecord]


class Revocations:
    """The revocations of one coordinator. Lives on the event loop."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._rows: dict[tuple[str, str], RevocationRecord] = {}
        self.on_change: list[Callable[[], None]] = []
        """Called after a revocation has taken effect: open calls must end."""

    async def load(self) -> None:
        """Read the ledger, at a start."""
        self._rows = {(row.kind, row.value): row for row in await self._ledger.do(self._ledger.store.revocations)}

    def denied(self, who: Identity) -> str:
        """Why the holder's certificate is denied; empty if it is not."""
        if not self._rows or not who.serial:
            return ""
        name = who.name if who.role == "client" else ""
        row = self.of(who.serial, who.key, name, who.begins)
        return "" if row is None else f"{row.kind} {row.value}: {row.reason or 'no reason given'}"

    def of(self, serial: str, key: str, name: str, begins: float) -> RevocationRecord | None:
        """The revocation of a certificate; None if it is not revoked. name: of a client; "" for other roles."""
        rows = self._rows
        row = rows.get(("serial", serial)) or rows.get(("key", key))
        if row is None and (by_name := rows.get(("name", name))) is not None and begins <= by_name.revoked_at:
            return by_name
        return row

    def of_record(self, record: CertificateRecord) -> RevocationRecord | None:
        """The revocation of a certificate of the ledger."""
        name = record.name if record.role == "client" else ""
        return self.of(record.serial, record.key, name, record.not_before)

    def includes(self, row: RevocationRecord) -> bool:
        """Whether this denies what a revocation of a list denies."""
        own = self._rows.get((row.kind, row.value))
        return own is not None and (row.kind != "name" or own.revoked_at >= row.revoked_at)

    def key_is_denied(self, key: str) -> bool:
        """Whether no certificate may be issued for this key."""
        return ("key", key) in self._rows

    def first_begin(self, name: str) -> float:
        """A new certificate of this client must not begin earlier, in Unix seconds: a revocation would deny it."""
        row = self._rows.get(("name", name))
        return 0.0 if row is None else int(row.revoked_at) + 1.0

    async def revoke(self, kind: RevocationKind, value: str, reason: str, actor: str) -> Revoked:
        """Deny certificates from now on, in the ledger first.

        With a name, all certificates of the client that begin before now are denied, and the keys of those in the
        ledger: nobody gets another certificate for them. With a serial or key, the certificates that were renewed from
        it are denied too. After each of these, only a token that is made later gives the name a certificate.
        """
        value, reason, now = _value_of(kind, value), one_line(reason), time.time()
        certificates = await self._ledger.do(self._ledger.store.certificates_with, kind, value)
        name = value if kind == "name" else certificates[0].name if certificates else ""
        rows = [RevocationRecord(kind, value, name, now, actor, reason)]
        if kind == "name":
            rows += [
                RevocationRecord("key", key, name, now, actor, reason) for key in sorted({c.key for c in certificates})
            ]
        why = HistoryRecord(now, actor, "certificates_revoked", name or value, f"{kind} {value}: {reason}")
        renewed = await self._ledger.do(self._ledger.store.revoke, rows, why)
        rows += [of_renewed(rows[0], certificate) for certificate in renewed] if kind != "name" else []
        for row in rows:
            place = row.kind, row.value
            self._rows[place] = row if row.kind == "name" else self._rows.get(place, row)
        for ended in self.on_change:
            ended()
        denied = {certificate.serial: certificate for certificate in [*certificates, *renewed]}
        return Revoked([certificate for certificate in denied.values() if certificate.not_after > now], rows)


def _value_of(kind: RevocationKind, value: str) -> str:
    """A value in the form of the ledger. Raises InvalidInput."""
    if kind == "name":
        try:
            return check_id("name", value)
        except ValueError as error:
            raise InvalidInput("name", "the name of a client", error) from None
    plain = value.replace(":", "").lower()
    plain = plain.lstrip("0") if kind == "serial" else plain
    if (_SERIAL if kind == "serial" else _KEY).fullmatch(plain) is None:
        expected = "a serial number in hex" if kind == "serial" else "SHA-256 of a public key: 64 characters of hex"
        raise InvalidInput(kind, expected, value)
    return plain
