"""The members of one secure aggregation, as both sides know them: their keys, plan, neighbours, and what is signed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

from fl_common.secure_aggregation.errors import BadSignature
from fl_common.secure_aggregation.fields import digest_of, in_order, packed, unpacked
from fl_common.secure_aggregation.graph import neighbours_of
from fl_common.secure_aggregation.keys import check_public_key, commitment
from fl_common.secure_aggregation.plan import Plan, plan_of
from fl_common.secure_aggregation.signatures import Key, Signer, Trust, check_signature, key_of
from fl_common.secure_aggregation.terms import Terms

_DIGEST_BYTES = 32
_KEY_FIELDS = 6


@dataclass(frozen=True, slots=True)
class KeyMessage:
    """A client's public keys and commitments, signed with the key of its certificate."""

    client: str
    mask_key: bytes
    """X25519, for the masks that it shares with others."""
    share_key: bytes
    """X25519, for the encryption of shares."""
    self_mask: bytes
    """Commitment to the key of its own mask."""
    coin: bytes
    """Commitment to its part in the order of the circle."""
    signature: bytes = b""
    chain: tuple[bytes, ...] = ()
    """Its certificate, then intermediate ones, in DER."""

    def signed(self, terms: Terms) -> bytes:
        """The signed bytes."""
        return packed(
            "impetus secure aggregation: keys", terms.digest,
            self.client, self.mask_key, self.share_key, self.self_mask, self.coin,
        )  # fmt: skip

    def sign(self, terms: Terms, signer: Signer) -> KeyMessage:
        """The message with its signature."""
        return replace(self, signature=signer.sign(self.signed(terms)), chain=signer.chain)

    def to_bytes(self) -> bytes:
        """The message on the wire."""
        return packed(
            self.client, self.mask_key, self.share_key, self.self_mask, self.coin, self.signature, *self.chain
        )

    @staticmethod
    def from_bytes(data: bytes) -> KeyMessage:
        """The message of `to_bytes`. Raises ValueError for anything else."""
        client, *fields = unpacked(data)
        if len(fields) < _KEY_FIELDS:
            raise ValueError(f"expected at least {_KEY_FIELDS + 1} fields of a key message, got {len(fields) + 1}")
        mask_key, share_key, self_mask, coin, signature, *chain = fields
        if len(self_mask) != _DIGEST_BYTES or len(coin) != _DIGEST_BYTES:
            raise ValueError(f"expected commitments of {_DIGEST_BYTES} bytes")
        return KeyMessage(client.decode(), mask_key, share_key, self_mask, coin, signature, tuple(chain))


@dataclass(frozen=True)
class Group:
    """The members in the order of id bytes. A member's place in this order is its number; its point is one more."""

    terms: Terms
    members: tuple[KeyMessage, ...]
    seed: bytes = b""
    """The seed of the order of the circle; empty before the coins are known, and if all are neighbours."""

    @staticmethod
    def of(terms: Terms, messages: Sequence[bytes]) -> Group:
        """The group of these key messages, whose signatures are not checked.

        Raises ValueError for malformed messages, or clients that are not in order or not in the cohort; PlanError.
        """
        members = tuple(KeyMessage.from_bytes(message) for message in messages)
        clients = [member.client for member in members]
        if not in_order(clients) or not set(clients) <= set(terms.cohort):
            raise ValueError("expected keys of clients of the cohort, in order and once each")
        plan_of(terms.settings, len(members))
        return Group(terms, members)

    @cached_property
    def plan(self) -> Plan:
        """The plan for these members. Raises PlanError if they are too few."""
        return plan_of(self.terms.settings, len(self.members))

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of terms and members."""
        return digest_of("members", self.terms.digest, *(member.to_bytes() for member in self.members))

    @cached_property
    def clients(self) -> tuple[str, ...]:
        """The members' ids."""
        return tuple(member.client for member in self.members)

    @property
    def needs_coins(self) -> bool:
        """Whether the order of the circle is still to be drawn."""
        return not self.plan.full and not self.seed

    @cached_property
    def _neighbours(self) -> tuple[tuple[int, ...], ...]:
        if self.needs_coins:
            raise RuntimeError("expected the members' coins before their neighbours are known")
        return neighbours_of(self.plan, self.seed)

    def number_of(self, client: str) -> int:
        """A member's number. Raises KeyError for another client."""
        try:
            return self.clients.index(client)
        except ValueError:
            raise KeyError(f"expected one of {len(self.members)} members, got {client}") from None

    def neighbours(self, number: int) -> tuple[int, ...]:
        """The numbers of a member's neighbours, ascending."""
        return self._neighbours[number]

    def holders(self, number: int) -> list[int]:
        """The numbers of those that hold shares of a member's secrets, ascending: itself and its neighbours."""
        return sorted((*self._neighbours[number], number))

    def check(self, trust: Trust, now: datetime) -> tuple[Key, ...]:
        """The members' verified signing keys. Raises BadSignature for a member whose keys are not signed by it."""
        return tuple(checked(self.terms, member, trust, now) for member in self.members)

    def signing_key(self, number: int) -> Key:
        """The signing key of a member that was checked before."""
        return key_of(self.members[number].chain[0])

    def with_coins(self, coins: Sequence[bytes]) -> Group:
        """The group with the order of the circle. Raises ValueError unless all members' coins are as committed."""
        if len(coins) != len(self.members):
            raise ValueError(f"expected the coins of all {len(self.members)} members, got {len(coins)}")
        for member, coin in zip(self.members, coins, strict=True):
            self.check_coin(member, coin)
        return replace(self, seed=digest_of("circle", self.digest, *coins))

    def check_coin(self, member: KeyMessage, coin: bytes) -> None:
        """Raises ValueError unless a coin is the one that its member committed to."""
        if commitment("coin", self.terms.digest, member.client, coin) != member.coin:
            raise ValueError(f"expected the coin that {member.client} committed to, got another one")

    def signed(self, sharers: Sequence[int], survivors: Sequence[int]) -> bytes:
        """What survivors sign: that these members sent shares, and that the updates of those are summed."""
        return packed(
            "impetus secure aggregation: survivors", self.digest, self.seed, packed(*sharers), packed(*survivors)
        )


def checked(terms: Terms, member: KeyMessage, trust: Trust, now: datetime) -> Key:
    """The signing key of a client whose certificate is trusted and that signed its keys. Raises BadSignature."""
    key = trust.check(member.client, member.chain, now)
    try:
        check_public_key(member.mask_key)
        check_public_key(member.share_key)
        check_signature(key, member.signature, member.signed(terms))
    except (ValueError, BadSignature) as error:
        raise BadSignature(f"{member.client}: {error}") from None
    return key
