"""What has passed a proxy: the sizes of chunks, whole uploads to be sent again, and the session they were sent in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from protos.fl.v1 import coordinator_pb2 as pb
from tests.chaos.grpc_bytes import PREFIX, Piece
from tests.chaos.traps import Direction

Upload = list[pb.SubmitUpdateRequest]
"""Header, chunks and trailer of one stream."""
_KEPT = 8
_HEADER, _TRAILER = 0x0A, 0x1A
"""First bytes of a SubmitUpdateRequest of that kind."""


@dataclass
class Log:
    """Belongs to one proxy; it is written in the proxy's thread."""

    chunks: dict[Direction, list[int]] = field(default_factory=lambda: {"up": [], "down": []})
    """Bytes of the large messages that passed whole, in order, with their prefixes."""
    uploads: deque[Upload] = field(default_factory=lambda: deque(maxlen=_KEPT))
    session_id: str = ""
    _streams: dict[tuple[int, int], list[bytearray]] = field(default_factory=dict)

    def passed(self, connection: int, direction: Direction, piece: Piece) -> None:
        """A piece went on."""
        place = piece.place
        if place is None:
            return
        if place.number and place.ends:
            self.chunks[direction].append(place.size)
        if direction == "up":
            messages = self._streams.setdefault((connection, place.stream), [bytearray()])
            messages[-1] += piece.data[max(0, PREFIX - place.start) :]
            if place.ends:
                self._look_at(messages)
                messages.append(bytearray())

    def closed(self, connection: int) -> None:
        """Of its streams, nothing more will come."""
        for key in [key for key in self._streams if key[0] == connection]:
            del self._streams[key]

    def _look_at(self, messages: list[bytearray]) -> None:
        """Once one more message of a stream is whole."""
        first, last = messages[0], messages[-1]
        if len(messages) > 1 and first[:1] == bytes([_HEADER]) and last[:1] == bytes([_TRAILER]):
            self.uploads.append([pb.SubmitUpdateRequest.FromString(bytes(each)) for each in messages])
            messages.clear()
        elif len(messages) == 1 and len(last) > 2 and last[0] == _HEADER and last[1] == len(last) - 2:
            # One string and nothing else: no other request is so short.
            self.session_id = pb.AttendRequest.FromString(bytes(last)).session_id
