"""A proxy's log: the sizes of chunks, complete uploads for sending again, and their session."""

from __future__ import annotations

import re
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
_SESSION = re.compile(rb"\x0a\x20([0-9a-f]{32})")
"""The beginning of every request but Register."""


@dataclass
class ProxyLog:
    """The log of one proxy, written in the proxy's thread."""

    chunks: dict[Direction, list[int]] = field(default_factory=lambda: {"up": [], "down": []})
    """Sizes in bytes of the large messages that passed completely, in order, with their prefixes."""
    uploads: deque[Upload] = field(default_factory=lambda: deque(maxlen=_KEPT))
    session_id: str = ""
    _streams: dict[tuple[int, int], list[bytearray]] = field(default_factory=dict)

    def passed(self, connection: int, direction: Direction, piece: Piece) -> None:
        """Record a piece that was passed on."""
        position = piece.position
        if position is None:
            return
        if position.number and position.ends:
            self.chunks[direction].append(position.size)
        if direction == "up":
            messages = self._streams.setdefault((connection, position.stream), [bytearray()])
            messages[-1] += piece.data[max(0, PREFIX - position.start) :]
            if position.ends:
                self._recognize(messages)
                messages.append(bytearray())

    def closed(self, connection: int) -> None:
        """Discard the streams of a closed connection."""
        for key in [key for key in self._streams if key[0] == connection]:
            del self._streams[key]

    def _recognize(self, messages: list[bytearray]) -> None:
        """Record an upload or a session id if the messages of a stream form one."""
        first, last = messages[0], messages[-1]
        if len(messages) > 1 and first[:1] == bytes([_HEADER]) and last[:1] == bytes([_TRAILER]):
            self.uploads.append([pb.SubmitUpdateRequest.FromString(bytes(each)) for each in messages])
            messages.clear()
        elif len(messages) == 1 and (session := _SESSION.match(last)) is not None:
            self.session_id = session[1].decode()
