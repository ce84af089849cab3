"""Byte strings in one byte string, each behind its length: no two lists of fields have the same bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

Field = bytes | str | int


def packed(*fields: Field) -> bytes:
    """The fields in order, each behind its length in 4 bytes, big-endian. Texts are UTF-8, numbers decimal digits."""
    raw = [field if isinstance(field, bytes) else str(field).encode() for field in fields]
    return b"".join(part for field in raw for part in (len(field).to_bytes(4, "big"), field))


def unpacked(data: bytes, count: int | None = None) -> list[bytes]:
    """The fields of `packed`. Raises ValueError unless these are whole fields, and `count` of them if it is given."""
    fields, at = list[bytes](), 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "big")
        if end > len(data):
            raise ValueError(f"expected whole fields, got one that ends {end - len(data)} bytes behind the message")
        fields.append(data[at + 4 : end])
        at = end
    if count is not None and len(fields) != count:
        raise ValueError(f"expected {count} fields, got {len(fields)}")
    return fields


def number_of(field: bytes) -> int:
    """A number in decimal digits. Raises ValueError for any other field."""
    if not field.isdigit() or len(field) > 20:
        raise ValueError(f"expected a number in digits, got {field[:20]!r}")
    return int(field)


def digest_of(*fields: Field) -> bytes:
    """SHA-256 of the packed fields."""
    return hashlib.sha256(packed("impetus secure aggregation", *fields)).digest()


def in_order(clients: Sequence[str]) -> bool:
    """Whether ids are in the order of their bytes, each once."""
    raw = [client.encode() for client in clients]
    return all(left < right for left, right in pairwise(raw))
