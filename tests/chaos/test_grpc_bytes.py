"""Messages are found in the bytes of a connection, however the bytes are split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.grpc_bytes import PREFACE, Piece, Reader

LARGE = 20
MESSAGES = st.lists(st.tuples(st.sampled_from([1, 3]), st.binary(max_size=60)), max_size=8)


def frame(stream: int, payload: bytes, padding: int | None) -> bytes:
    """A DATA frame, padded when `padding` is not None."""
    padded = payload if padding is None else bytes([padding]) + payload + bytes(padding)
    flags = 0 if padding is None else 0x8
    return len(padded).to_bytes(3) + bytes([0, flags]) + stream.to_bytes(4) + padded


def conversation(draw: Callable[[st.SearchStrategy[Any]], Any], messages: list[tuple[int, bytes]]) -> bytes:
    """A preface, a settings frame and the messages, split into frames at random places."""
    wire = PREFACE + (6).to_bytes(3) + bytes([4, 0]) + bytes(4) + b"\0\3\0\0\0\x64"
    for stream, message in messages:
        rest = b"\0" + len(message).to_bytes(4) + message
        while rest:
            length = draw(st.integers(1, len(rest)))
            wire += frame(stream, rest[:length], draw(st.sampled_from([None, 0, 3])))
            rest = rest[length:]
    return wire


@given(st.data(), MESSAGES)
def test_pieces_are_the_received_bytes_with_their_messages(
    data: st.DataObject, messages: list[tuple[int, bytes]]
) -> None:
    """Concatenated they are the input. Those with a position are the large messages of each stream, in order."""
    wire = conversation(data.draw, messages)
    reader = Reader(LARGE, from_client=True)
    pieces: list[Piece] = []
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        pieces += reader.feed(wire[start:end])
    assert b"".join(piece.data for piece in pieces) == wire
    found: dict[tuple[int, int], bytearray] = {}
    for piece in pieces:
        if (position := piece.position) is not None and position.number and position.end > 5:
            found.setdefault((position.stream, position.number), bytearray()).extend(piece.data)
            assert len(found[position.stream, position.number]) == position.end - 5
    large = {stream: [each for of, each in messages if of == stream and len(each) >= LARGE] for stream in (1, 3)}
    expected = {(stream, 1 + n): each for stream, rows in large.items() for n, each in enumerate(rows)}
    assert found == expected


@given(st.data(), MESSAGES)
def test_the_other_direction_has_no_preface(data: st.DataObject, messages: list[tuple[int, bytes]]) -> None:
    """The bytes of a server begin with a frame."""
    wire = conversation(data.draw, messages)[len(PREFACE) :]
    numbers = [piece.position.number for piece in Reader(LARGE, from_client=False).feed(wire) if piece.position]
    assert max(numbers, default=0) == max(
        (sum(of == stream and len(each) >= LARGE for of, each in messages) for stream in (1, 3)), default=0
    )
