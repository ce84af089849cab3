"""Denied certificates: in memory, because every call is checked, and the same in the ledger."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from fl_common.names import check_id
from fl_server.errors import InvalidInput, one_line
from fl_server.identity import Identity
from fl_server.store.certificates import CertificateRecord, RevocationKind, RevocationRecord, of_renewed
from fl_server.store.ledger import Ledger
from fl_server.store.records import HistoryRecord

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
        value, reason, now = _checked(kind, value), one_line(reason), time.time()
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


def _checked(kind: RevocationKind, value: str) -> str:
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
