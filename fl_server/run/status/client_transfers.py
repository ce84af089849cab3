"""What the clients of the round under way fetch and send, for display only. Nothing is decided by it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
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
    unknown: frozenset[str] = frozenset()
    """Clients that worked for this exchange when the coordinator started: what they fetched before is not known."""
    _exchange: tuple[int, int] | None = None
    """Round and exchange of all this."""

    @contextmanager
    def transfer(self, client: str, direction: Literal["down", "up"], size: int, done: int) -> Iterator[ClientTransfer]:
        """A transfer for the exchange under way, for as long as the block lasts; the caller adds to `done`."""
        transfer = self.newest[client] = ClientTransfer(direction, size, done)
        try:
            yield transfer
        finally:
            transfer.open, transfer.changed = False, time.monotonic()

    def begin(self, round_: int, exchange: int) -> None:
        """An attempt begins: the first one of an exchange, or another one, in which the clients go on."""
        if (round_, exchange) != self._exchange:
            self.clear()
            self._exchange = round_, exchange

    def resume(self, round_: int, exchange: int, working: Iterable[str]) -> None:
        """The coordinator started while these clients worked for an exchange."""
        self._exchange, self.unknown = (round_, exchange), frozenset(working)

    def clear(self) -> None:
        """The round is over, or begins again."""
        self.newest.clear()
        self.outs.clear()
        self.unknown, self._exchange = frozenset(), None
