"""Counts what a networked run would transfer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fl_client.connection.bundles.expected import ResourceKey
from protos.codec import Buffer
from protos.differences import make_difference

Name = tuple[ResourceKey, bytes]
"""A bundle's key and digest, with the key of its encoding."""

Names = Mapping[Name, int]
"""Sizes of bundles."""

Offers = Mapping[Name, tuple[Name, int]]
"""Differences: the bundle that one makes, the bundle that it needs, and its size in bytes."""

_NOTHING: Names = {}


class Sent(NamedTuple):
    """A bundle whose differences are sent too."""

    name: Name
    data: Buffer
    word: int
    """Bytes of a word of its differences."""


class TrafficCounter:
    """Tensor bytes in both directions. A daemon keeps the bundles of its latest assignment and fetches only others."""

    def __init__(self) -> None:
        self.offers: Offers = {}
        """The differences that are sent now."""
        self._sent: Mapping[ResourceKey, Sent] = {}
        self._held: dict[str, Names] = {}
        self._bytes_down = 0
        self._bytes_up = 0

    def send(self, bundles: Mapping[ResourceKey, Sent]) -> None:
        """The bundles of an exchange that have differences to those before. One that stays keeps its difference."""
        offers: dict[Name, tuple[Name, int]] = {}
        for key, bundle in bundles.items():
            before = self._sent.get(key)
            if bundle.name in self.offers:
                offers[bundle.name] = self.offers[bundle.name]
            elif before is not None and before.name != bundle.name and len(before.data) == len(bundle.data):
                difference = make_difference(before.data, bundle.data, bundle.word)
                if difference is not None:
                    offers[bundle.name] = before.name, len(difference)
        self._sent, self.offers = bundles, offers

    def missing(self, client: str, bundles: Names) -> int:
        """Bytes of the bundles of an assignment that the client does not hold, or of differences to those it holds."""
        return self._beside(self._held.get(client, _NOTHING), bundles)

    def _beside(self, held: Names, bundles: Names) -> int:
        needed = ((size, *self.offers.get(name, (None, size))) for name, size in bundles.items() if name not in held)
        return sum(smaller if base in held else size for size, base, smaller in needed)

    def download(self, clients: Iterable[str], bundles: Names) -> int:
        """Count what clients fetch for the bundles of an assignment. Returns the bytes.

        Those that had the same assignment hold one and the same object.
        """
        known: dict[int, tuple[Names, int]] = {}
        total = 0
        for client in clients:
            held = self._held.get(client, _NOTHING)
            if id(held) not in known:
                known[id(held)] = held, self._beside(held, bundles)
            total += known[id(held)][1]
            self._held[client] = bundles
        self._bytes_down += total
        return total

    def delivered(self, client: str, bundles: Names, down: int) -> None:
        """Count `down` bytes that the client fetched for the bundles of an earlier assignment, which it holds now."""
        self._held[client] = bundles
        self._bytes_down += down

    def upload(self, size: int) -> None:
        """Count an update of `size` bytes."""
        self._bytes_up += size

    def interrupted(self, client: str, bundles: Names, down: int, up: int) -> None:
        """Count the bytes of an assignment that ended early. The client holds its bundles if it got all of them."""
        if down >= self.missing(client, bundles):
            self._held[client] = bundles
        self._bytes_down += down
        self._bytes_up += up

    @property
    def held(self) -> Mapping[str, Names]:
        """The bundles that each client holds now."""
        return dict(self._held)

    def put_back(self, held: Mapping[str, Names], offers: Offers) -> None:
        """Restore what the clients hold, and the differences that were sent. What was sent before is forgotten."""
        self._held, self.offers, self._sent = dict(held), offers, {}

    def take(self) -> tuple[int, int]:
        """Bytes (down, up) since the last call."""
        counted = (self._bytes_down, self._bytes_up)
        self._bytes_down = self._bytes_up = 0
        return counted
