"""One client's part in one attempt: what it received, what was decided, and the answers that follow from them.

Values only. The rules, which message is answered and when, are in `member.py`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fl_common.secure_aggregation import messages
from fl_common.secure_aggregation.errors import BadSignature, Refused
from fl_common.secure_aggregation.fields import packed, unpacked
from fl_common.secure_aggregation.group import Group, KeyMessage
from fl_common.secure_aggregation.keys import Secrets, agreed, commitment, decrypted, encrypted, public_key
from fl_common.secure_aggregation.masks import Mask
from fl_common.secure_aggregation.shamir import SHARE_BYTES, shares_of
from fl_common.secure_aggregation.signatures import Signer, check_signature
from fl_common.secure_aggregation.terms import Terms

_ROOT_BYTES = 32


@dataclass(frozen=True)
class Attempt:
    """A client's part in one attempt. An empty field is not known yet."""

    terms: Terms
    client: str
    root: bytes
    keys: bytes
    """The own key message. A signature differs each time it is made, so it is kept."""
    work: bytes = b""
    """Digest of everything that decides the client's update."""
    floor: int = 0
    """The fewest clients whose updates may be summed, for this client."""
    key_list: bytes = b""
    coins: bytes = b""
    delivery: bytes = b""
    released: bytes = b""
    """Digest of the numbers in the masked update."""
    survivors: bytes = b""
    signature: bytes = b""
    opened: bytes = b""
    """Digest of the signatures with which shares were opened."""

    @staticmethod
    def begun(terms: Terms, client: str, signer: Signer) -> Attempt:
        """An attempt with new secrets."""
        secrets = Secrets(os.urandom(_ROOT_BYTES))
        keys = KeyMessage(
            client,
            public_key(secrets.mask_key),
            public_key(secrets.share_key),
            commitment("self mask", terms.digest, client, secrets.self_mask),
            commitment("coin", terms.digest, client, secrets.coin),
        )
        return Attempt(terms, client, secrets.root, keys.sign(terms, signer).to_bytes())

    def to_bytes(self) -> bytes:
        """The attempt with its secrets."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return packed(*(value.to_bytes() if name == "terms" else value for name, value in values.items()))

    @staticmethod
    def from_bytes(data: bytes) -> Attempt:
        """The attempt of `to_bytes`. Raises ValueError for anything else."""
        names = [field.name for field in fields(Attempt)]
        values: dict[str, Any] = dict(zip(names, unpacked(data, len(names)), strict=True))
        terms, client, floor = Terms.from_bytes(values["terms"]), values["client"].decode(), int(values["floor"])
        return Attempt(**{**values, "terms": terms, "client": client, "floor": floor})

    @cached_property
    def _secrets(self) -> Secrets:
        return Secrets(self.root)

    @cached_property
    def group(self) -> Group:
        """The members. Raises Refused before the key list, and ValueError or PlanError if it cannot be used."""
        if not self.key_list:
            raise Refused("place", "expected the key list before this message")
        group = Group.of(self.terms, messages.fields_of(self.terms, self.key_list))
        return group.with_coins(messages.fields_of(self.terms, self.coins)) if self.coins else group

    @cached_property
    def number(self) -> int:
        """This client's number among the members."""
        return self.group.number_of(self.client)

    @cached_property
    def received(self) -> messages.Delivery:
        """Who sent shares, and those for this client. Raises Refused before, and ValueError for a malformed message."""
        if not self.delivery:
            raise Refused("place", "expected the shares before this message")
        return messages.Delivery.from_bytes(self.terms, self.delivery, len(self.group.members))

    @cached_property
    def survived(self) -> tuple[int, ...]:
        """The numbers of the survivors. Raises Refused before, and ValueError for a malformed message."""
        if not self.survivors:
            raise Refused("place", "expected the survivor list before this message")
        return messages.numbers(messages.fields_of(self.terms, self.survivors), len(self.group.members))

    def check_members(self) -> None:
        """Raises Refused unless the members are enough, and this client with its own keys is one of them."""
        least = max(self.floor, self.group.plan.fewest)
        if len(self.group.members) < least:
            raise Refused("floor", f"expected keys of at least {least} clients, got {len(self.group.members)}")
        if KeyMessage.from_bytes(self.keys) not in self.group.members:
            raise Refused("signature", "expected the own keys in the key list, got others or none")

    def check_left(self, numbers: Collection[int]) -> None:
        """Raises Refused unless enough members, and holders of this client's shares, are left, itself among them."""
        plan, left = self.group.plan, set(numbers)
        least = max(self.floor, plan.fewest)
        if self.number not in left or len(left) < least:
            raise Refused("floor", f"expected at least {least} clients with this one, got {len(left)}")
        near = len(left.intersection(self.group.holders(self.number)))
        if near < plan.threshold:
            raise Refused("floor", f"expected at least {plan.threshold} holders of this client's shares, got {near}")

    def check_quorum(self, signatures: bytes) -> None:
        """Raises Refused unless enough members signed the survivor list, and ValueError for a malformed message."""
        most = messages.SIGNATURE_BYTES
        given = messages.parse_by_number(self.terms, signatures, len(self.group.members), (1, most))
        signed, valid = self.to_sign, 0
        for number, signature in given.items():
            try:
                check_signature(self.group.signing_key(number), signature, signed)
            except BadSignature:
                continue
            valid += 1
        quorum = self.group.plan.quorum
        if valid < quorum:
            raise Refused("quorum", f"expected {quorum} signatures of the survivor list that was signed, got {valid}")

    @property
    def to_sign(self) -> bytes:
        """What the survivors sign."""
        return self.group.signed(self.received.sharers, self.survived)

    def coin(self) -> bytes:
        """The message with the coin."""
        return messages.message(self.terms, self._secrets.coin)

    def shares(self) -> bytes:
        """The message with both secrets' shares for each neighbour, encrypted for it."""
        texts = {
            holder: encrypted(self._share_key(self.number, holder), b"".join(both), self.group.digest, self.group.seed)
            for holder, both in self._own_shares().items()
            if holder != self.number
        }
        return messages.by_number(self.terms, texts)

    def masks(self) -> list[Mask]:
        """The own mask, and one with each neighbour that sent shares."""
        members, near = self.group.members, self.group.neighbours(self.number)
        return [Mask(self._secrets.self_mask)] + [
            Mask(
                agreed(self._secrets.mask_key, members[other].mask_key, self.group.digest, "mask"), self.number > other
            )
            for other in sorted(set(self.received.sharers).intersection(near))
        ]

    def opening(self) -> bytes:
        """The message with one share of each secret that this client holds shares of."""
        opened = {self.number: self._own_shares()[self.number][0]}
        for sender, text in self.received.shares.items():
            try:
                both = decrypted(self._share_key(sender, self.number), text, self.group.digest, self.group.seed)
            except ValueError:
                continue  # the sender's fault: others may have usable shares of its secrets
            opened[sender] = both[:SHARE_BYTES] if sender in self.survived else both[SHARE_BYTES:]
        return messages.by_number(self.terms, opened)

    def _own_shares(self) -> Mapping[int, tuple[bytes, bytes]]:
        """Holder -> its shares of the own mask and of the own key."""
        holders, secrets = self.group.holders(self.number), self._secrets
        points, threshold = [holder + 1 for holder in holders], self.group.plan.threshold
        of_mask, of_key = (
            shares_of(secret, secrets.coefficients(name, threshold), points)
            for name, secret in (("self mask", secrets.self_mask), ("mask key", secrets.mask_key))
        )
        return dict(zip(holders, zip(of_mask, of_key, strict=True), strict=True))

    def _share_key(self, sender: int, receiver: int) -> bytes:
        """The key of the one text from a member to another, one of which is this client."""
        members = self.group.members
        other = members[receiver if sender == self.number else sender]
        purpose = "shares", members[sender].client, members[receiver].client
        return agreed(self._secrets.share_key, other.share_key, self.terms.digest, *purpose)


def digest_of_numbers(values: npt.NDArray[Any], scalars: Sequence[int]) -> bytes:
    """SHA-256 of the numbers of an update."""
    hasher = hashlib.sha256(packed(values.dtype.str, *scalars))
    hasher.update(np.ascontiguousarray(values).data)
    return hasher.digest()
