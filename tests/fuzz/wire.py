"""Changes of bytes: flips, cuts, insertions, damaged numbers, and fields as only a hostile peer would write them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

MOST_BYTES = 1 << 16
"""An input is not made larger than this by repetition."""


def damaged(random: Random, raw: bytes, changes: int) -> bytes:
    """The bytes with this many changes."""
    for _ in range(changes):
        raw = random.choice(_CHANGES)(random, raw)[:MOST_BYTES]
    return raw


def _flip(random: Random, raw: bytes) -> bytes:
    if not raw:
        return b"\xff"
    at = random.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ 1 << random.randrange(8)]) + raw[at + 1 :]


def _replace(random: Random, raw: bytes) -> bytes:
    at = random.randrange(len(raw) + 1)
    return raw[:at] + bytes([random.choice((0, 1, 0x7F, 0x80, 0xFE, 0xFF, random.randrange(256)))]) + raw[at + 1 :]


def _cut(random: Random, raw: bytes) -> bytes:
    return raw[: random.randrange(len(raw) + 1)]


def _cut_inside(random: Random, raw: bytes) -> bytes:
    start, end = sorted((random.randrange(len(raw) + 1), random.randrange(len(raw) + 1)))
    return raw[:start] + raw[end:]


def _insert(random: Random, raw: bytes) -> bytes:
    at = random.randrange(len(raw) + 1)
    return raw[:at] + random.randbytes(random.choice((1, 1, 2, 8, 100))) + raw[at:]


def _repeat(random: Random, raw: bytes) -> bytes:
    start, end = sorted((random.randrange(len(raw) + 1), random.randrange(len(raw) + 1)))
    return raw[:end] + raw[start:end] * random.choice((1, 1, 2, 50)) + raw[end:]


def _swap(random: Random, raw: bytes) -> bytes:
    at = random.randrange(len(raw) + 1)
    return raw[at:] + raw[:at]


def _damage_number(random: Random, raw: bytes) -> bytes:
    """A varint that is too long, has no end, or is needlessly long."""
    at = random.randrange(len(raw) + 1)
    bad = random.choice(
        (b"\xff" * 9 + b"\x01", b"\xff" * 9 + b"\x7f", b"\xff" * 10, b"\x80" * 9 + b"\x01", b"\x80\x00")
    )
    return raw[:at] + bad + raw[at + 1 :]


_NUMBERS = (b"\xff" * 9 + b"\x01", b"\xff" * 9 + b"\x7f", b"\xff" * 10, b"\x80" * 9 + b"\x01", b"\x80\x00")


def _add_field(random: Random, raw: bytes) -> bytes:
    """An unknown field, a group, a wire type that does not exist, number 0, or text that is not UTF-8."""
    number = random.choice((0, 1, 2, 3, 5, 15, 16, 19_000, 2**29 - 1))
    content = random.choice((b"", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"x" * 200))
    kind = random.randrange(8)
    key = _varint(number << 3 | kind)
    body = {0: b"\x01", 1: bytes(8), 2: _varint(len(content)) + content, 3: b"", 5: bytes(4)}.get(kind, content)
    return raw + key + body if random.random() < 0.5 else key + body + raw


def _nest(random: Random, raw: bytes) -> bytes:
    """The bytes as the content of a field, again and again."""
    key = _varint(random.choice((1, 2, 3, 6)) << 3 | 2)
    for _ in range(random.choice((1, 2, 20, 63, 64, 65, 99, 100, 101, 300))):
        raw = key + _varint(len(raw)) + raw
    return raw


def _groups(random: Random, raw: bytes) -> bytes:
    """Many groups that begin, or begin and end."""
    count = random.choice((1, 50, 99, 101, 5000))
    return raw + b"\x0b" * count + (b"\x0c" * count if random.random() < 0.5 else b"")


def _garbage(random: Random, raw: bytes) -> bytes:
    return random.choice((b"", b"\x00", random.randbytes(random.randrange(300)), b"\xff" * 300, b"{}", b"\x00" * 300))


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value >> 7:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


_CHANGES: tuple[Callable[[Random, bytes], bytes], ...] = (
    _flip, _flip, _flip, _replace, _replace, _cut, _cut_inside, _insert, _repeat, _swap, _damage_number,
    _damage_number, _add_field, _add_field, _nest, _groups, _garbage,
)  # fmt: skip
