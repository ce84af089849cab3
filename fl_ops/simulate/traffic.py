"""Counts the tensor bytes that a networked run would transfer."""

from __future__ import annotations

from collections.abc import Mapping

from fl_client.connection.bundles.bundle import ResourceKey

Names = Mapping[tuple[ResourceKey, bytes], int]
"""Sizes of bundles, by key and digest."""


class TrafficCounter:
    """Tensor bytes in both directions. A daemon keeps the bundles of its latest assignment and fetches only others."""

    def __init__(self) -> None:
        self._held: dict[str, Names] = {}
        self._bytes_down = 0
        self._bytes_up = 0

    def missing(self, client: str, bundles: Names) -> int:
        """Bytes of the bundles of an assignment that the client does not hold."""
        held = self._held.get(client, {})
        return sum(size for name, size in bundles.items() if name not in held)

    def download(self, client: str, bundles: Names) -> int:
        """Count the bundles of an assignment that the client does not hold. Returns their bytes."""
        size = self.missing(client, bundles)
        self._held[client] = bundles
        self._bytes_down += size
        return size

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

    def put_back(self, held: Mapping[str, Names]) -> None:
        """Restore what the clients hold."""
        self._held = dict(held)

    def take(self) -> tuple[int, int]:
        """Bytes (down, up) since the last call."""
        counted = (self._bytes_down, self._bytes_up)
        self._bytes_down = self._bytes_up = 0
        return counted
