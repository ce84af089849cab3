"""A coordinator and its clients in one process: the messages of a secure aggregation go from one to the other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache

import numpy as np
import numpy.typing as npt

from fl_common.secure_aggregation.collector import Collector
from fl_common.secure_aggregation.masks import Reader
from fl_common.secure_aggregation.member import Member
from fl_common.secure_aggregation.signatures import Signer, Trust
from fl_common.secure_aggregation.terms import Place, Settings, SiteFloors, Terms, value_bits_for
from fl_ops.certificates import ca

NOW = datetime.now(UTC)
RUN = "coordinator/run"
STAGES = ("keys", "coins", "shares", "masked", "signatures", "openings")
BITS = 8

Values = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@cache
def authority(name: str) -> ca.Authority:
    """An authority of clients."""
    return ca.make_authority(name, ca.Validity(NOW - timedelta(days=1), 30))


def signer(client: str, of: str = "Clients") -> Signer:
    """A client's certificate of an authority, and its key. Always the same."""
    return _issued(client, of)


@cache
def _issued(client: str, of: str) -> Signer:
    certificate, key = ca.issue(authority(of), ca.Identity("client", client), ca.Validity(NOW, 1))
    return Signer.from_pem(ca.certificate_pem(certificate), ca.key_pem(key))


@cache
def trust() -> Trust:
    """Trust in the clients' authority, which is outside of the coordinator."""
    return Trust.of_authorities(ca.certificate_pem(authority("Clients").certificate), "outside")


def names(count: int) -> tuple[str, ...]:
    """Ids of clients, in order."""
    return tuple(f"c{number:03}" for number in range(count))


def terms_of(
    clients: int | Sequence[str],
    values: int = 5,
    round_: int = 0,
    attempt: int = 0,
    draw: int = 0,
    settings: Settings | None = None,
    value_bits: int = 0,
) -> Terms:
    """Terms for a cohort."""
    cohort = names(clients) if isinstance(clients, int) else tuple(clients)
    bits = value_bits or value_bits_for(BITS, len(cohort))
    return Terms(Place(RUN, round_, draw), attempt, cohort, values, bits, 2, settings or Settings(), "test")


def reader(update: bytes) -> Reader:
    """A masked update in memory."""
    return lambda offset, count: memoryview(update)[offset : offset + count]


@dataclass
class Sum:
    """What the coordinator learnt, and what is right."""

    values: list[int]
    scalars: list[int]
    survivors: tuple[str, ...]


@dataclass
class Federation:
    """The clients of one run. Each is made again from its state for every message, as if it had been killed."""

    terms: Terms
    states: dict[str, bytes] = field(default_factory=dict)
    trusted: Trust = field(default_factory=trust)
    """Whose certificates the clients take."""
    taken: Trust | None = None
    """Whose the coordinator takes; None: the same."""
    invented: Collection[str] = ()
    """Clients that the coordinator made up, with certificates of its own authority."""
    work: bytes = b"work of round 0"
    updates: dict[str, bytes] = field(default_factory=dict)
    """The masked updates that arrived."""

    def __post_init__(self) -> None:
        self.key_list = self.coins = self.survivors = self.signatures = b""
        self.deliveries: Mapping[str, bytes] = {}
        self.values: Mapping[str, Values] = {}
        self.collector = Collector(self.terms, self.taken or self.trusted)

    def member(self, client: str) -> Member:
        """The client, from its state."""
        state = self.states.get(client)
        return Member(client, self.terms.place.run) if state is None else Member.from_bytes(state)

    def _signer(self, client: str) -> Signer:
        return signer(client, "Coordinator" if client in self.invented else "Clients")

    def begin(
        self, client: str, terms: Terms | None = None, work: bytes | None = None, floors: SiteFloors | None = None
    ) -> bytes:
        """A client's key message."""
        member = self.member(client)
        return self._kept(
            member,
            client,
            member.begin(terms or self.terms, work or self.work, self._signer(client), floors or SiteFloors()),
        )

    def answer(self, client: str, stage: str, data: bytes) -> bytes:
        """A client's answer to a message of the coordinator. stage: the method's name without "answer_"."""
        member = self.member(client)
        if stage == "key_list":
            made = member.answer_key_list(data, self.trusted, NOW)
        elif stage == "survivors":
            made = member.answer_survivors(data, self._signer(client))
        else:
            made = getattr(member, f"answer_{stage}")(data)
        return self._kept(member, client, made)

    def mask(self, client: str, delivery: bytes, values: Values, scalars: Sequence[int]) -> bytes:
        """A client's masked update."""
        member = self.member(client)
        return self._kept(member, client, b"".join(member.mask(delivery, values, scalars)))

    def _kept(self, member: Member, client: str, answer: bytes) -> bytes:
        self.states[client] = member.to_bytes()
        return answer

    def until(self, stage: str, gone: Mapping[str, str], values: Mapping[str, Values]) -> Sum | None:
        """Carry out the stages before this one; all of them with "end", and return the sum.

        gone: client -> the stage in which it drops out. values: of each client. Raises TooFew.
        """
        order = (*STAGES, "end")
        self.values = values
        for now in order[: order.index(stage)]:
            staying = [
                client for client in self.expected(now) if order.index(gone.get(client, "end")) > order.index(now)
            ]
            getattr(self, f"_{now}")(staying)
        return self.sum() if stage == "end" else None

    def expected(self, stage: str) -> Sequence[str]:
        """The clients that are asked in a stage."""
        if stage == "keys":
            return self.terms.cohort
        return {
            "coins": self.collector.members, "shares": self.collector.members, "masked": self.collector.sharers,
        }.get(stage, self.collector.survivors)  # fmt: skip

    def _keys(self, clients: Iterable[str]) -> None:
        for client in clients:
            self.collector.add_keys(client, self.begin(client), NOW)
        self.key_list = self.collector.close_keys()

    def _coins(self, clients: Iterable[str]) -> None:
        if self.collector.needs_coins:
            for client in clients:
                self.collector.add_coin(client, self.answer(client, "key_list", self.key_list))
            self.coins = self.collector.close_coins()

    def _shares(self, clients: Iterable[str]) -> None:
        data, kind = (self.coins, "coins") if self.coins else (self.key_list, "key_list")
        for client in clients:
            self.collector.add_shares(client, self.answer(client, kind, data))
        self.deliveries = self.collector.close_shares()

    def _masked(self, clients: Iterable[str]) -> None:
        for client in clients:
            self.updates[client] = self.mask(client, self.deliveries[client], self.values[client], scalars_of(client))
        self.survivors = self.collector.close_masked(self.updates)

    def _signatures(self, clients: Iterable[str]) -> None:
        for client in clients:
            self.collector.add_signature(client, self.answer(client, "survivors", self.survivors))
        self.signatures = self.collector.close_signatures()

    def _openings(self, clients: Iterable[str]) -> None:
        for client in clients:
            self.collector.add_opening(client, self.answer(client, "signatures", self.signatures))

    def sum(self) -> Sum:
        """The coordinator's result."""
        unmasked = self.collector.unmasked([reader(self.updates[client]) for client in self.collector.survivors])
        values = [int(value) for chunk in unmasked.values() for value in chunk]
        return Sum(values, unmasked.scalars(), self.collector.survivors)


def scalars_of(client: str) -> list[int]:
    """A client's scalars."""
    return [int(client[1:]) + 1, 7]


def values_of(terms: Terms, seed: int = 0) -> dict[str, Values]:
    """Random numbers of BITS bits for each client."""
    random, most = np.random.default_rng(seed), 2 ** (BITS - 1)
    return {client: random.integers(1 - most, most, terms.values, np.int32) for client in terms.cohort}


def plain_sum(values: Mapping[str, Values], clients: Collection[str]) -> Sum:
    """The sum without a protocol."""
    total = np.sum([values[client].astype(np.int64) for client in clients], axis=0)
    scalars = np.sum([scalars_of(client) for client in clients], axis=0)
    return Sum([int(value) for value in total], [int(number) for number in scalars], tuple(clients))
