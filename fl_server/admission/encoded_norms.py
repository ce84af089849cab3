"""Digest of the bytes of an encoded update on disk, and tensor norms of its decoded values, in one read."""

from __future__ import annotations

from collections.abc import Iterator

import blake3
import torch

from fl_server.aggregation.encoded_update import EncodedUpdate, Part
from fl_server.aggregation.updates import PayloadShape
from fl_server.store.spool.part_file import UpdateFile
from protos.encodings import EncodingError

READ_BYTES = 1 << 20
"""Bytes of the file that are read at a time."""
VALUES = 1 << 17
"""Values that are decoded at a time: a multiple of the blocks of every encoding."""


def digest_and_norms_of_encoded(update: EncodedUpdate) -> tuple[bytes, list[float], str]:
    """As `digest_and_norms`, of an update in an encoding; and what is wrong with its bytes, empty if nothing is.

    The digest is that of the bytes of the file. Sums are made of the decoded values, and of none after the first wrong
    byte. Raises StoreError for a file that is too short.
    """
    sums = [0.0] * len(update.shape.entries)
    with UpdateFile(update.path) as file:
        reads, wrong = HashedReads(file), ""
        try:
            for entry, part in _parts(update):
                values = update.decoded(part, reads.read).double()
                sums[entry] += float(torch.dot(values, values))
        except EncodingError as error:
            wrong = str(error)
        return reads.digest(), sums, wrong


def _parts(update: EncodedUpdate) -> Iterator[tuple[int, Part]]:
    """All floating tensors in pieces, by rising offset, each with the place of its tensor among the entries."""
    place = 0
    for payload in update.shape.payloads:
        for number, entry in enumerate(payload.layout.entries):
            count = entry.numel if entry.dtype.is_floating_point else 0
            yield from ((place, part) for part in _pieces(payload, number, count))
            place += 1


def _pieces(payload: PayloadShape, number: int, count: int) -> Iterator[Part]:
    return (Part(payload, number, start, min(VALUES, count - start)) for start in range(0, count, VALUES))


class HashedReads:
    """Reads of a file by offsets that do not fall; each byte of it is read and hashed once."""

    def __init__(self, file: UpdateFile) -> None:
        self._file, self._hasher = file, blake3.blake3()
        self._start, self._kept = 0, bytearray()
        """The latest bytes, which may be asked for again, and their offset."""

    def read(self, offset: int, size: int) -> memoryview:
        """`size` bytes from `offset` on; fewer at the end of the file."""
        if offset < self._start:
            raise ValueError(f"expected offsets that do not fall, got {offset} after {self._start}")
        while self._end < min(offset + size, self._file.size_bytes):
            self._advance(offset)
        return memoryview(self._kept)[offset - self._start :][:size]

    def digest(self) -> bytes:
        """BLAKE3-256 of the whole file."""
        while self._end < self._file.size_bytes:
            self._advance(self._end)
        return self._hasher.digest()

    @property
    def _end(self) -> int:
        return self._start + len(self._kept)

    def _advance(self, offset: int) -> None:
        """Read on. Bytes before `offset` are not kept."""
        data = bytearray(min(READ_BYTES, self._file.size_bytes - self._end))
        self._file.read_into(self._end, data)
        self._hasher.update(data)
        dropped = min(offset - self._start, len(self._kept))
        self._start, self._kept = self._start + dropped, self._kept[dropped:] + data
