"""What a proxy does to a large gRPC message that it meets: cut in front, inside or behind, damage, hold."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Literal

import google_crc32c

from tests.chaos.grpc_bytes import NOTHING, PREFIX, Piece, Place

Direction = Literal["up", "down"]
Where = Literal["before", "inside", "behind"]
Action = Literal["reset", "end", "hold"]
"""Of a connection: TCP RST; TCP FIN; or nothing passes any more in this direction."""

_FLIP = 0x10
_CRC = 5
"""A chunk's last field: a tag and four bytes."""


@dataclass(eq=False)
class Trap:
    """Waits for a message of a stream, and snaps once."""

    direction: Direction
    message: int
    """Of the large ones of its stream, from 1."""
    snapped: threading.Event = field(default_factory=threading.Event, init=False)
    """It really happened."""


@dataclass(eq=False)
class Stop(Trap):
    """Ends or holds the connection at a point of a message."""

    where: Where = "before"
    action: Action = "reset"

    def passes(self, place: Place) -> int | None:
        """How many bytes of the piece still pass before it snaps; None: it does not snap here."""
        point = {"before": 0, "inside": PREFIX + (place.size - PREFIX) // 2, "behind": place.size}[self.where]
        # A prefix may come in parts; that it is a large message's is known with the last of them.
        begun_after = place.start > point and place.start >= PREFIX
        return None if begun_after or point > place.end else max(0, point - place.start)


@dataclass(eq=False)
class Damage(Trap):
    """Flips a bit of a chunk's data. With `sealed` the checksum is made to fit it: only a digest can tell."""

    sealed: bool = False
    _left: set[int] = field(default_factory=lambda: {-1}, init=False)
    _stream: int = field(default=0, init=False)

    def damaged(self, piece: Piece, place: Place) -> bytes:
        """The piece with what of the damage lies in it."""
        if place.start < PREFIX:
            self._left, self._stream = set(self._flips(place.size)), place.stream
        if place.stream != self._stream:
            return piece.data
        data = bytearray(piece.data)
        for at, flip in self._flips(place.size).items():
            if at in self._left and place.start <= at < place.end:
                data[at - place.start] ^= flip
                self._left.discard(at)
        return bytes(data)

    @property
    def done(self) -> bool:
        """Whether all of it has passed."""
        return not self._left

    def _flips(self, size: int) -> dict[int, int]:
        """Offset in the message to the bits that are flipped there.

        CRCs are affine: crc(a xor d) = crc(a) xor crc(d) xor crc(0), for strings of one length, and leading zeros of
        d do not matter. So the right checksum is known without the data.
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
    """The traps of one proxy: those set, and those that have snapped."""

    waiting: list[Trap] = field(default_factory=list)
    snapped: list[Trap] = field(default_factory=list)

    def met(self, direction: Direction, piece: Piece) -> tuple[Piece, Piece, Stop | None]:
        """What passes of a piece, what is left of it, and the stop in between."""
        data, place = piece.data, piece.place
        if place is None:
            return piece, NOTHING, None
        met = [trap for trap in self.waiting if (trap.direction, trap.message) == (direction, place.number)]
        for damage in met:
            if isinstance(damage, Damage):
                data = damage.damaged(Piece(data, place), place)
                if damage.done:
                    self._snap(damage)
        for stop in met:
            if isinstance(stop, Stop) and (passes := stop.passes(place)) is not None:
                self._snap(stop)
                return (*Piece(data, place).split(passes), stop)
        return Piece(data, place), NOTHING, None

    def _snap(self, trap: Trap) -> None:
        self.waiting.remove(trap)
        self.snapped.append(trap)
        trap.snapped.set()
