"""Actions of a proxy on a large gRPC message: cut before, inside or behind it, damage it, or hold it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Literal

import google_crc32c

from tests.chaos.grpc_bytes import NOTHING, PREFIX, Piece, Position

Direction = Literal["up", "down"]
Where = Literal["before", "inside", "behind"]
Action = Literal["reset", "end", "hold"]
"""What happens to the connection: TCP RST, TCP FIN, or nothing more passes in this direction."""

_FLIP = 0x10
_CRC = 5
"""A chunk's last field: a tag and four bytes."""


@dataclass(eq=False)
class Trap:
    """An action that is triggered once by a message of a stream."""

    direction: Direction
    message: int
    """Number of the message among the large ones of its stream, from 1."""
    triggered: threading.Event = field(default_factory=threading.Event, init=False)
    """Set once the action has happened."""


@dataclass(eq=False)
class Stop(Trap):
    """End or hold the connection at a point of a message."""

    where: Where = "before"
    action: Action = "reset"

    def passes(self, position: Position) -> int | None:
        """How many bytes of the piece still pass before it triggers; None if it is not triggered here."""
        point = {"before": 0, "inside": PREFIX + (position.size - PREFIX) // 2, "behind": position.size}[self.where]
        # A prefix may arrive in parts. Only its last part shows that the message is large.
        begun_after = position.start > point and position.start >= PREFIX
        return None if begun_after or point > position.end else max(0, point - position.start)


@dataclass(eq=False)
class Damage(Trap):
    """Flip a bit of a chunk's data. With `sealed` the checksum is corrected, so that only the digest differs."""

    sealed: bool = False
    _left: set[int] = field(default_factory=lambda: {-1}, init=False)
    _stream: int = field(default=0, init=False)

    def damaged(self, piece: Piece, position: Position) -> bytes:
        """The piece with its part of the damage."""
        if position.start < PREFIX:
            self._left, self._stream = set(self._flips(position.size)), position.stream
        if position.stream != self._stream:
            return piece.data
        data = bytearray(piece.data)
        for at, flip in self._flips(position.size).items():
            if at in self._left and position.start <= at < position.end:
                data[at - position.start] ^= flip
                self._left.discard(at)
        return bytes(data)

    @property
    def done(self) -> bool:
        """Whether all damaged bytes have passed."""
        return not self._left

    def _flips(self, size: int) -> dict[int, int]:
        """Offset in the message -> bits to flip there.

        CRCs are affine: crc(a xor d) = crc(a) xor crc(d) xor crc(0), for strings of one length, and leading zeros of
        d do not matter. So the corrected checksum follows without the data.
        """
        at, end = PREFIX + (size - PREFIX) // 2, size - _CRC
        flips = {at: _FLIP}
        if self.sealed:
            behind = bytes(end - at - 1)
            mask = google_crc32c.value(bytes([_FLIP]) + behind) ^ google_crc32c.value(b"\0" + behind)
            flips |= {end + 1 + index: each for index, each in enumerate(mask.to_bytes(4, "little")) if each}
        return flips


@dataclass
class Traps:
    """The traps of one proxy: the waiting and the triggered ones."""

    waiting: list[Trap] = field(default_factory=list)
    triggered: list[Trap] = field(default_factory=list)

    def met(self, direction: Direction, piece: Piece) -> tuple[Piece, Piece, Stop | None]:
        """The part of a piece that passes, the remaining part, and the stop between them."""
        data, position = piece.data, piece.position
        if position is None:
            return piece, NOTHING, None
        met = [trap for trap in self.waiting if (trap.direction, trap.message) == (direction, position.number)]
        for damage in met:
            if isinstance(damage, Damage):
                data = damage.damaged(Piece(data, position), position)
                if damage.done:
                    self._trigger(damage)
        for stop in met:
            if isinstance(stop, Stop) and (passes := stop.passes(position)) is not None:
                self._trigger(stop)
                return (*Piece(data, position).split(passes), stop)
        return Piece(data, position), NOTHING, None

    def _trigger(self, trap: Trap) -> None:
        self.waiting.remove(trap)
        self.triggered.append(trap)
        trap.triggered.set()
