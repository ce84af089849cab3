"""The messages between the coordinator and one client, after the keys. Each begins with the digest of its terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl_common.secure_aggregation.fields import number_of, packed, unpacked
from fl_common.secure_aggregation.keys import KEY_BYTES
from fl_common.secure_aggregation.shamir import SHARE_BYTES
from fl_common.secure_aggregation.terms import Terms

CIPHERTEXT_BYTES = 2 * SHARE_BYTES + 16
SIGNATURE_BYTES = 1024
"""The longest signature that is taken: RSA with a key of 8192 bits."""


def message(terms: Terms, *fields: bytes | str | int) -> bytes:
    """A message under these terms."""
    return packed(terms.digest, *fields)


def fields_of(terms: Terms, data: bytes) -> list[bytes]:
    """The fields of a message. Raises ValueError if it is malformed or belongs to other terms."""
    fields = unpacked(data)
    if not fields or fields[0] != terms.digest:
        raise ValueError("expected a message under the terms of this attempt, got one of others")
    return fields[1:]


def numbers(fields: Sequence[bytes], below: int) -> tuple[int, ...]:
    """Ascending numbers below a limit. Raises ValueError for anything else."""
    made = tuple(map(number_of, fields))
    if any(left >= right for left, right in zip(made, (*made[1:], below), strict=True)):
        raise ValueError(f"expected ascending numbers below {below}")
    return made


def by_number(terms: Terms, values: Mapping[int, bytes]) -> bytes:
    """A message with a byte string for each of several members, ascending."""
    return message(terms, *(field for number in sorted(values) for field in (number, values[number])))


def parse_by_number(terms: Terms, data: bytes, below: int, sizes: tuple[int, int]) -> dict[int, bytes]:
    """The byte strings of `by_number`, of so many bytes at least and at most. Raises ValueError for anything else."""
    fields = fields_of(terms, data)
    if len(fields) % 2:
        raise ValueError("expected a byte string behind each number")
    values = dict(zip(numbers(fields[::2], below), fields[1::2], strict=True))
    if any(not sizes[0] <= len(value) <= sizes[1] for value in values.values()):
        raise ValueError(f"expected byte strings of {sizes[0]} to {sizes[1]} bytes, got others")
    return values


def parse_coin(terms: Terms, data: bytes) -> bytes:
    """The coin of a member's message. Raises ValueError for anything else."""
    [coin] = fields_of(terms, data)
    if len(coin) != KEY_BYTES:
        raise ValueError(f"expected a coin of {KEY_BYTES} bytes, got {len(coin)}")
    return coin


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a sharer gets: who sent shares, and the shares for it, encrypted."""

    sharers: tuple[int, ...]
    shares: Mapping[int, bytes]
    """Sender -> encrypted share of its two secrets."""

    def to_bytes(self, terms: Terms) -> bytes:
        """The message on the wire."""
        return message(terms, packed(*self.sharers), by_number(terms, self.shares))

    @staticmethod
    def from_bytes(terms: Terms, data: bytes, members: int) -> Delivery:
        """The delivery of `to_bytes`. Raises ValueError for anything else."""
        fields = fields_of(terms, data)
        if len(fields) != 2:
            raise ValueError(f"expected two fields of a delivery, got {len(fields)}")
        shares = parse_by_number(terms, fields[1], members, (CIPHERTEXT_BYTES, CIPHERTEXT_BYTES))
        return Delivery(numbers(unpacked(fields[0]), members), shares)
