"""Updates of a client that lies: each must be refused."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable

from protos.chunks import encode_piece
from protos.digests import digest_message, digest_of
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2

Header = training_pb2.UpdateHeader


def _numbers(value: float) -> Callable[[Header, bytes], bytes]:
    def lie(header: Header, data: bytes) -> bytes:
        changed = data[:-4] + struct.pack("<f", value)
        header.digest.CopyFrom(digest_message(digest_of(changed)))
        return changed

    return lie


def _digest(header: Header, data: bytes) -> bytes:
    header.digest.CopyFrom(digest_message(digest_of(b"something else")))
    return data


def _size(header: Header, data: bytes) -> bytes:
    header.size_bytes -= 4
    header.digest.CopyFrom(digest_message(digest_of(data[:-4])))
    return data[:-4]


def _examples(header: Header, data: bytes) -> bytes:
    header.num_examples = 0
    return data


def _epoch(header: Header, data: bytes) -> bytes:
    header.state_epoch += 1 << 40
    return data


LIES = {
    "nan": _numbers(float("nan")), "infinity": _numbers(float("inf")), "digest": _digest, "size": _size,
    "examples": _examples, "epoch": _epoch,
}  # fmt: skip
"""Kinds of lies: each changes the header, and returns the bytes that are sent."""


async def lying(kind: str, parts: AsyncIterator[bytes], lied: set[bytes]) -> AsyncIterator[bytes]:
    """The messages of an upload that lies. One that resumes behind its first byte stays as it is.

    lied: gets the digest that the lie names, if the honest update has another one.
    """
    messages = [part async for part in parts]
    first, *chunks, last = [pb.SubmitUpdateRequest.FromString(message) for message in messages]
    if first.header.resume_offset or not chunks:
        for message in messages:
            yield message
        return
    honest = first.header.digest.value
    data = LIES[kind](first.header, b"".join(chunk.chunk.data for chunk in chunks))
    lied |= {first.header.digest.value} - {honest}
    last.trailer.size_bytes = len(data)
    yield first.SerializeToString()
    yield encode_piece(memoryview(data), 0)
    yield last.SerializeToString()
