"""The coordinator's side of one attempt: it collects the messages of stages, and finds the masks at the end.

It has no I/O and keeps no file. The caller stores every message that was taken, and the clients of each closed stage,
before it answers. After a restart the same messages, added again, make the same collector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import TypeVar

from fl_common.secure_aggregation import messages
from fl_common.secure_aggregation.errors import BadMessage, BadSignature, TooFew
from fl_common.secure_aggregation.group import Group, KeyMessage, checked
from fl_common.secure_aggregation.keys import agreed, commitment, public_key
from fl_common.secure_aggregation.masks import Mask, Reader, Unmasked
from fl_common.secure_aggregation.plan import plan_of
from fl_common.secure_aggregation.shamir import SHARE_BYTES, recovered, weights_at_zero
from fl_common.secure_aggregation.signatures import Trust, check_signature
from fl_common.secure_aggregation.terms import Terms


class Collector:
    """One attempt of one secure aggregation."""

    def __init__(self, terms: Terms, trust: Trust) -> None:
        """trust: whose certificates the coordinator takes."""
        self.terms, self._trust = terms, trust
        self._keys: dict[str, bytes] = {}
        self._group: Group | None = None
        self._coins: dict[int, bytes] = {}
        self._shares: dict[int, bytes] = {}
        self._texts: dict[int, dict[int, bytes]] = {}
        """Sender -> holder -> encrypted shares."""
        self._sharers: tuple[int, ...] = ()
        self._survivors: tuple[int, ...] = ()
        self._signatures: dict[int, bytes] = {}
        self._openings: dict[int, bytes] = {}
        self._opened: dict[int, dict[int, bytes]] = {}
        """Member -> holder -> opened share."""

    @property
    def group(self) -> Group:
        """The members, after the keys. Raises RuntimeError before."""
        if self._group is None:
            raise RuntimeError("expected the keys to be closed first")
        return self._group

    @property
    def members(self) -> tuple[str, ...]:
        """Clients whose keys arrived in time."""
        return () if self._group is None else self._group.clients

    @property
    def sharers(self) -> tuple[str, ...]:
        """Members whose shares arrived in time."""
        return self._named(self._sharers)

    @property
    def survivors(self) -> tuple[str, ...]:
        """Sharers whose masked updates are summed."""
        return self._named(self._survivors)

    @property
    def signers(self) -> tuple[str, ...]:
        """Survivors that signed the survivor list."""
        return self._named(sorted(self._signatures))

    @property
    def needs_coins(self) -> bool:
        """After the keys: whether coins come before the shares."""
        return self.group.needs_coins

    def _named(self, numbers: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.group.clients[number] for number in numbers)

    def add_keys(self, client: str, data: bytes, now: datetime) -> None:
        """Take the keys of a client of the cohort. Raises BadMessage."""
        if self._group is not None or client not in self.terms.cohort:
            raise BadMessage(client, "expected keys of a client of the cohort before their stage was closed")
        try:
            message = KeyMessage.from_bytes(data)
            if message.client != client:
                raise ValueError(f"expected keys of {client}, got those of {message.client}")
            checked(self.terms, message, self._trust, now)
        except (ValueError, BadSignature) as error:
            raise BadMessage(client, str(error)) from None
        _once(self._keys, client, client, data)

    def close_keys(self) -> bytes:
        """The key list, for all members. Raises TooFew."""
        clients = sorted(self._keys, key=str.encode)
        least = self.terms.settings.min_clients
        if len(clients) < least or len(clients) < plan_of(self.terms.settings, len(clients)).fewest:
            raise TooFew("keys", len(clients), least)
        self._group = Group.of(self.terms, [self._keys[client] for client in clients])
        return messages.message(self.terms, *(self._keys[client] for client in clients))

    def add_coin(self, client: str, data: bytes) -> None:
        """Take a member's coin. Raises BadMessage."""
        number = self._number(client)
        try:
            coin = messages.parse_coin(self.terms, data)
            self.group.check_coin(self.group.members[number], coin)
        except ValueError as error:
            raise BadMessage(client, str(error)) from None
        _once(self._coins, number, client, coin)

    def close_coins(self) -> bytes:
        """All coins, for all members. Raises TooFew: with coins left out, the coordinator could choose the order."""
        if len(self._coins) < len(self.members):
            raise TooFew("coins", len(self._coins), len(self.members))
        coins = [self._coins[number] for number in range(len(self.members))]
        self._group = self.group.with_coins(coins)
        return messages.message(self.terms, *coins)

    def add_shares(self, client: str, data: bytes) -> None:
        """Take a member's encrypted shares. Raises BadMessage."""
        number, size = self._number(client), messages.CIPHERTEXT_BYTES
        try:
            texts = messages.parse_by_number(self.terms, data, len(self.members), (size, size))
            if tuple(texts) != self.group.neighbours(number):
                raise ValueError(f"expected shares for each of its {self.group.plan.neighbours} neighbours")
        except ValueError as error:
            raise BadMessage(client, str(error)) from None
        _once(self._shares, number, client, data)
        self._texts[number] = texts

    def close_shares(self) -> dict[str, bytes]:
        """What each sharer gets: who sent shares, and those for it. Raises TooFew."""
        self._check_enough("shares", self._shares, self._shares)
        self._sharers = tuple(sorted(self._shares))
        deliveries = {}
        for number in self._sharers:
            near = [sender for sender in self.group.neighbours(number) if sender in self._shares]
            delivery = messages.Delivery(self._sharers, {sender: self._texts[sender][number] for sender in near})
            deliveries[self.group.clients[number]] = delivery.to_bytes(self.terms)
        return deliveries

    def close_masked(self, clients: Iterable[str]) -> bytes:
        """The survivor list, for all survivors. It is final once a client has seen it. Raises TooFew.

        clients: those whose masked updates arrived whole, all of them sharers.
        """
        numbers = sorted(map(self._number, clients))
        if not set(numbers) <= set(self._sharers):
            raise ValueError("expected masked updates of clients that sent shares")
        self._check_enough("masked updates", numbers, self._sharers)
        self._survivors = tuple(numbers)
        return messages.message(self.terms, *numbers)

    def add_signature(self, client: str, data: bytes) -> None:
        """Take a survivor's signature of the survivor list. Raises BadMessage."""
        number = self._survivor(client)
        try:
            fields = messages.fields_of(self.terms, data)
            if len(fields) != 1 or len(fields[0]) > messages.SIGNATURE_BYTES:
                raise ValueError("expected one signature")
            check_signature(
                self.group.signing_key(number), fields[0], self.group.signed(self._sharers, self._survivors)
            )
        except (ValueError, BadSignature) as error:
            raise BadMessage(client, str(error)) from None
        self._signatures.setdefault(number, fields[0])  # another signature of the same list says the same

    def close_signatures(self) -> bytes:
        """The signatures, for all survivors. Raises TooFew."""
        quorum = self.group.plan.quorum
        if len(self._signatures) < quorum:
            raise TooFew("signatures", len(self._signatures), quorum)
        return messages.by_number(self.terms, self._signatures)

    def add_opening(self, client: str, data: bytes) -> None:
        """Take a survivor's opened shares. Raises BadMessage."""
        number = self._survivor(client)
        try:
            shares = messages.parse_by_number(self.terms, data, len(self.members), (SHARE_BYTES, SHARE_BYTES))
            if not set(shares) <= set(self.group.holders(number)).intersection(self._sharers):
                raise ValueError("expected shares of secrets that it holds, got others")
        except ValueError as error:
            raise BadMessage(client, str(error)) from None
        _once(self._openings, number, client, data)
        for member, share in shares.items():
            self._opened.setdefault(member, {})[number] = share

    def missing(self) -> tuple[str, ...]:
        """The sharers of whose secret too few shares were opened."""
        threshold = self.group.plan.threshold
        return self._named(number for number in self._sharers if len(self._opened.get(number, ())) < threshold)

    def unmasked(self, updates: Sequence[Reader]) -> Unmasked:
        """The sum of the survivors' masked updates. Raises TooFew, and BadMessage for a secret that cannot be found.

        updates: of the survivors, in any order.
        """
        if missing := self.missing():
            raise TooFew(f"opened shares of {missing[0]}'s secret", len(self._openings), self.group.plan.threshold)
        if len(updates) != len(self._survivors):
            raise ValueError(f"expected the masked updates of {len(self._survivors)} survivors, got {len(updates)}")
        weights = cache(weights_at_zero)
        masks = [Mask(self._secret(number, self._opens_self_mask, weights)) for number in self._survivors]
        for number in sorted({*self._sharers} - {*self._survivors}):
            masks += self._masks_with(number, self._secret(number, self._opens_key, weights))
        return Unmasked(self.terms, updates, masks)

    def _masks_with(self, dropped: int, key: bytes) -> list[Mask]:
        """The masks that survivors share with a member that dropped out, as they are in the survivors' updates."""
        group = self.group
        return [
            Mask(agreed(key, group.members[other].mask_key, group.digest, "mask"), negative=other > dropped)
            for other in sorted(set(group.neighbours(dropped)).intersection(self._survivors))
        ]

    def _secret(
        self, number: int, is_right: Callable[[int, bytes], bool], weights: Callable[[tuple[int, ...]], list[int]]
    ) -> bytes:
        """The opened secret of a member. Wrong shares are left out as long as enough others are next to each other."""
        opened: Mapping[int, bytes] = self._opened[number]
        holders, threshold = sorted(opened), self.group.plan.threshold
        for start in range(len(holders) if len(holders) > threshold else 1):
            chosen = sorted((holders[start:] + holders[:start])[:threshold])
            secret = recovered(weights(tuple(holder + 1 for holder in chosen)), [opened[holder] for holder in chosen])
            if secret is not None and is_right(number, secret):
                return secret
        raise BadMessage(self.group.clients[number], "expected shares that give the secret it committed to, got others")

    def _opens_self_mask(self, number: int, secret: bytes) -> bool:
        member = self.group.members[number]
        return commitment("self mask", self.terms.digest, member.client, secret) == member.self_mask

    def _opens_key(self, number: int, secret: bytes) -> bool:
        return public_key(secret) == self.group.members[number].mask_key

    def _check_enough(self, stage: str, left: Iterable[int], secrets: Iterable[int]) -> None:
        """Raises TooFew unless so many members are left, and enough holders of each of these members' secrets."""
        left, plan = set(left), self.group.plan
        if len(left) < plan.fewest:
            raise TooFew(stage, len(left), plan.fewest)
        near = min(len(left.intersection(self.group.holders(number))) for number in secrets)
        if near < plan.threshold:
            raise TooFew(f"{stage} around a member", near, plan.threshold)

    def _number(self, client: str) -> int:
        try:
            return self.group.number_of(client)
        except KeyError as error:
            raise BadMessage(client, str(error)) from None

    def _survivor(self, client: str) -> int:
        number = self._number(client)
        if number not in self._survivors:
            raise BadMessage(client, "expected a message of a survivor")
        return number


_Key = TypeVar("_Key", str, int)


def _once(taken: dict[_Key, bytes], key: _Key, client: str, data: bytes) -> None:
    """Take a message. Raises BadMessage if the client sent another one before."""
    if taken.setdefault(key, data) != data:
        raise BadMessage(client, "expected its first message of this stage again, got another one")
