"""The bytes that a run would put on the wire: each bundle once for each client that has not got it."""

from __future__ import annotations

from collections.abc import Mapping

from fl_client.bundles import Bundle
from protos.fl.v1.tensor_pb2 import ResourceKind


class Wire:
    """Counts tensor bytes. A daemon keeps the bundles of its latest assignment by digest, and fetches the others."""

    def __init__(self) -> None:
        self._held: dict[str, set[tuple[ResourceKind, bytes]]] = {}
        self.bytes_down = 0
        """Since the last `read`."""
        self.bytes_up = 0

    def down(self, client: str, bundles: Mapping[ResourceKind, Bundle]) -> None:
        """A client loads the bundles of an assignment."""
        wanted = {(kind, bundle.layout.digest(bundle.data)): len(bundle.data) for kind, bundle in bundles.items()}
        held = self._held.get(client, set())
        self.bytes_down += sum(size for name, size in wanted.items() if name not in held)
        self._held[client] = set(wanted)

    def up(self, size: int) -> None:
        """A client sends an update."""
        self.bytes_up += size

    def read(self) -> tuple[int, int]:
        """(down, up) since the last call."""
        counted = (self.bytes_down, self.bytes_up)
        self.bytes_down = self.bytes_up = 0
        return counted
