"""What the clients of the round under way fetch and send, for display only. Nothing is decided by it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True)
class ClientTransfer:
    """The newest transfer of a client to or from this process."""

    direction: Literal["down", "up"]
    size: int
    """Bytes of the whole."""
    done: int
    """Bytes of it that the receiver has."""
    open: bool = True
    changed: float = field(default_factory=time.monotonic)
    """When it began or ended, by the monotonic clock."""


@dataclass(slots=True)
class ClientTransfers:
    """The clients of the round under way. Lives on the event loop."""

    newest: dict[str, ClientTransfer] = field(default_factory=dict)
    """By client."""
    outs: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Client -> the state in which its assignment ended without an admitted update, and why."""

    @contextmanager
    def transfer(self, client: str, direction: Literal["down", "up"], size: int, done: int) -> Iterator[ClientTransfer]:
        """A transfer, for as long as the block lasts; the caller adds to `done`."""
        transfer = self.newest[client] = ClientTransfer(direction, size, done)
        try:
            yield transfer
        finally:
            transfer.open, transfer.changed = False, time.monotonic()

    def clear(self) -> None:
        """The next round begins."""
        self.newest.clear()
        self.outs.clear()
