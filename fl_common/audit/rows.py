"""One row of an audit log, and its hash: the one place that defines the chain.

    hash(n) = SHA-256( hash(n - 1) + field(number) + field(time_us) + field(actor) + ... + field(detail) )
    field(value) = length of the text's UTF-8 bytes, 4 bytes, big-endian + those bytes

Fields are in the order of FIELDS; numbers are decimal text. hash(0) is 32 zero bytes. The lengths make the encoding
unambiguous: no two rows have the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from fl_common.logs import escaped

FIELDS = ("number", "time_us", "actor", "address", "method", "subject", "result", "detail")
"""In the order in which they are hashed."""
_NUMBERS = FIELDS[:2]
_LARGEST = 2**63 - 1
_MOST_CHARACTERS: Mapping[str, int] = {
    "actor": 200, "address": 200, "method": 100, "subject": 256, "result": 64, "detail": 1000,
}  # fmt: skip
HASH_BYTES = 32


class Head(NamedTuple):
    """The newest row of a chain."""

    number: int
    """0: there are no rows."""
    hash: bytes

    def __str__(self) -> str:
        return f"{self.number}:{self.hash.hex()}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """From NUMBER:HASH. Raises ValueError."""
        number, _, digest = text.strip().partition(":")
        found = cls(int(number), bytes.fromhex(digest)) if number.isascii() and number.isdigit() else None
        if found is None or len(found.hash) != HASH_BYTES:
            raise ValueError(f"expected NUMBER:HASH with a hash of {2 * HASH_BYTES} hex digits, got {text[:100]!r}")
        return found


START = Head(0, bytes(HASH_BYTES))
"""The head of an empty chain."""


@dataclass(frozen=True, slots=True)
class AuditRow:
    """A row with its place in the chain."""

    number: int
    """From 1, without gaps."""
    time_us: int
    """Unix time in whole microseconds, by the writer's clock."""
    actor: str
    address: str
    method: str
    subject: str
    result: str
    detail: str
    hash: bytes = b""

    @property
    def head(self) -> Head:
        """This row as the newest of a chain."""
        return Head(self.number, self.hash)

    def linked(self, previous: bytes) -> bytes:
        """The hash that this row has behind a row with the hash `previous`."""
        digest = hashlib.sha256(previous)
        for name in FIELDS:
            value = str(getattr(self, name)).encode("utf-8", "surrogatepass")
            digest.update(len(value).to_bytes(4, "big") + value)
        return digest.digest()

    def to_json(self) -> str:
        """The row as one line of JSON, with the hash in hex."""
        values = {name: getattr(self, name) for name in FIELDS} | {"hash": self.hash.hex()}
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        """The row of a line of JSON. Raises ValueError."""
        found = json.loads(line)
        if not isinstance(found, dict) or set(found) != {*FIELDS, "hash"}:
            raise ValueError(f"expected the fields {', '.join((*FIELDS, 'hash'))}")
        for name, value in found.items():
            good = type(value) is int and 0 <= value <= _LARGEST if name in _NUMBERS else isinstance(value, str)
            if not good:
                raise ValueError(f"{name}: expected {'a number' if name in _NUMBERS else 'text'}, got {value!r:.100}")
        return cls(**{**found, "hash": bytes.fromhex(found["hash"])})


def limited(fields: Mapping[str, str]) -> dict[str, Any]:
    """The text fields of a row: of limited length, with escapes in place of characters that cannot be printed."""
    return {name: _cut(fields[name], most) for name, most in _MOST_CHARACTERS.items()}


def _cut(text: str, most: int) -> str:
    shown = escaped(text[:most])
    return shown if len(shown) <= most and len(text) <= most else f"{shown[: most - 3]}..."
