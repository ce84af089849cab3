"""Which bytes of a TCP connection belong to which gRPC message: HTTP/2 (RFC 9113), read only as far as needed.

A connection is a sequence of frames. A stream's concatenated DATA frames are messages, each after a prefix of five
bytes (compressed or not, then its length). Frames and messages have different boundaries. A chunk of an update or of a
model is recognized by its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""Bytes that a client sends before its first frame."""
PREFIX = 5
"""Bytes before a message."""
_HEADER = 9
_DATA, _PADDED = 0, 0x8


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a piece in a message."""

    stream: int
    number: int
    """Number of the message among the large ones of its stream, from 1; 0 for a small message."""
    start: int
    """Offset of the piece's first byte; 0 is the first byte of the prefix."""
    end: int
    """Offset behind its last byte."""
    size: int
    """Bytes of the message with its prefix."""

    @property
    def ends(self) -> bool:
        """Whether the message ends with the piece."""
        return self.end == self.size


@dataclass(frozen=True, slots=True)
class Piece:
    """Received bytes. Without a position: no message, or the first bytes of a prefix that arrived in parts."""

    data: bytes
    position: Position | None = None

    def split(self, at: int) -> tuple[Piece, Piece]:
        """The first `at` bytes and the rest; a piece without bytes has no position."""
        if self.position is None or not 0 < at < len(self.data):
            return (self, NOTHING) if at else (NOTHING, self)
        border = self.position.start + at
        front, back = replace(self.position, end=border), replace(self.position, start=border)
        return Piece(self.data[:at], front), Piece(self.data[at:], back)


NOTHING = Piece(b"")


@dataclass(slots=True)
class _Stream:
    """The progress of one stream."""

    prefix: bytearray = field(default_factory=bytearray)
    size: int = 0
    """Size of the current message with its prefix; 0 while unknown."""
    at: int = 0
    large: int = 0
    """Number of large messages so far."""


class Reader:
    """Splits one direction of a connection into pieces. The concatenated pieces are the input."""

    def __init__(self, large: int, *, from_client: bool) -> None:
        self._large = large + PREFIX
        self._preface = len(PREFACE) if from_client else 0
        self._header = bytearray()
        self._streams: dict[int, _Stream] = {}
        self._stream = 0
        self._is_data = self._wants_padding = False
        self._body = self._padding = 0

    def feed(self, data: bytes) -> Iterator[Piece]:
        """The pieces of the next bytes, without delay."""
        while data:
            piece = self._next(data)
            data = data[len(piece.data) :]
            yield piece

    def _next(self, data: bytes) -> Piece:
        if self._preface:
            self._preface -= len(taken := data[: self._preface])
            return Piece(taken)
        if self._wants_padding:
            self._wants_padding, self._padding = False, data[0]
            self._body -= 1 + self._padding
            return Piece(data[:1])
        if self._body and self._is_data:
            return self._message(data)
        if self._body:
            self._body -= len(taken := data[: self._body])
            return Piece(taken)
        if self._padding:
            self._padding -= len(taken := data[: self._padding])
            return Piece(taken)
        return self._frame(data)

    def _frame(self, data: bytes) -> Piece:
        """Read a frame's header or a part of it."""
        taken = data[: _HEADER - len(self._header)]
        self._header += taken
        if len(self._header) == _HEADER:
            length, kind, flags, stream = (
                int.from_bytes(self._header[start:end]) for start, end in ((0, 3), (3, 4), (4, 5), (5, 9))
            )
            self._body, self._is_data, self._stream = length, kind == _DATA, stream & 0x7FFFFFFF
            self._wants_padding = self._is_data and bool(flags & _PADDED)
            self._header.clear()
        return Piece(taken)

    def _message(self, data: bytes) -> Piece:
        """A piece of a frame's data within one message; the prefix is a piece of its own."""
        stream = self._streams.setdefault(self._stream, _Stream())
        missing = stream.size - stream.at if stream.size else PREFIX - len(stream.prefix)
        taken = data[: min(missing, self._body)]
        self._body -= len(taken)
        if stream.size:
            position: Position | None = self._position(stream, stream.at, stream.at + len(taken))
        else:
            stream.prefix += taken
            position = self._prefixed(stream, len(taken))
        if stream.size and stream.at == stream.size:
            stream.size = stream.at = 0
            stream.prefix.clear()
        return Piece(taken, position)

    def _prefixed(self, stream: _Stream, taken: int) -> Position | None:
        """The position of a complete prefix; None while it is incomplete."""
        if len(stream.prefix) < PREFIX:
            return None
        stream.size = PREFIX + int.from_bytes(stream.prefix[1:])
        stream.large += stream.size >= self._large
        return self._position(stream, PREFIX - taken, PREFIX)

    def _position(self, stream: _Stream, start: int, end: int) -> Position:
        stream.at = end
        return Position(self._stream, stream.large if stream.size >= self._large else 0, start, end, stream.size)
