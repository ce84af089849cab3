"""A finished update, and the folder that keeps it until the coordinator has said what became of it."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, TypeVar
from weakref import WeakSet, finalize

from blake3 import blake3
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import DecodeError

from fl_client import files, memory_file
from fl_client.next_state import NextState
from protos.chunks import Buffer
from protos.digests import digest_bytes, digest_of
from protos.fl.v1 import training_pb2

KEPT = 4
"""Updates without a client state that are kept at most; the oldest go first. A coordinator waits for one at a time."""

_HEAD = struct.Struct("<32sQ")

_BLOCK_BYTES = 1 << 20

_SPARE = f"spare{files.PART}"
"""The file of an update that was dropped, for the next to be written over; a daemon that starts removes it."""

Assigned = TypeVar("Assigned", training_pb2.Assignment, training_pb2.EvaluationAssignment)

Key = tuple[str, int, int]
"""(run id, round, exchange)."""


def key_of(key: training_pb2.ExchangeKey) -> Key:
    """The key as a value that can be looked up."""
    return (key.run_id, key.round, key.exchange)


def message_of(key: Key) -> training_pb2.ExchangeKey:
    """The key as the wire has it."""
    return training_pb2.ExchangeKey(run_id=key[0], round=key[1], exchange=key[2])


def work_of(assignment: Assigned) -> bytes:
    """Digest over all that the answer depends on: equal for a repeat, whatever its attempt, deadline and limits."""
    work = type(assignment)()
    work.CopyFrom(assignment)
    for field in _BESIDE_THE_WORK.intersection(work.DESCRIPTOR.fields_by_name):
        work.ClearField(field)
    return digest_of(work.SerializeToString(deterministic=True))


_BESIDE_THE_WORK = {"attempt", "deadline", "upload_encodings", "max_update_bytes", "traceparent"}


def name_of(enum: EnumTypeWrapper, number: int) -> str:
    """An enum value's name; its number where a newer coordinator says one that is not known here."""
    return next((name for name, value in enum.items() if value == number), str(number))


@dataclass(frozen=True, slots=True)
class Update:
    """What was computed for one assignment, and is kept before it goes up."""

    work: bytes
    """Digest of the assignment that it answers."""
    header: training_pb2.UpdateHeader
    """Complete but for session_id and resume_offset."""
    pieces: tuple[Buffer, ...]
    """The payloads, one behind the other; they may share the memory of tensors."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What goes up for one assignment, the same bytes however often it is sent; read as it is sent, not held."""

    header: training_pb2.UpdateHeader
    """Complete but for session_id and resume_offset."""
    read: Callable[[int, int], bytes]
    """Bytes of the payloads: so many from an offset on. Raises OSError when they cannot be read any more."""

    @staticmethod
    def in_memory(update: Update) -> Outgoing:
        """Of an update that no disk took."""
        data = b"".join(update.pieces)
        return Outgoing(update.header, lambda offset, length: data[offset : offset + length])


class _OpenFile:
    """A part of a file, open for as long as somebody may read it."""

    def __init__(self, path: Path, start: int) -> None:
        self.path, self._start = path, start
        self._descriptor = os.open(path, os.O_RDONLY)
        finalize(self, os.close, self._descriptor)

    def read(self, offset: int, length: int) -> bytes:
        """As `Outgoing.read`."""
        if len(data := os.pread(self._descriptor, length, self._start + offset)) < length:
            raise OSError(f"expected {length} bytes of the update from {offset} on, got {len(data)}: was it cut?")
        return data


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of a file without reading its tensors."""

    path: Path
    work: bytes
    header: training_pb2.UpdateHeader
    start: int
    """Of the update's data in the file."""
    has_state: bool


class PendingUpdates:
    """Files of updates whose outcome is not known, one for each key, written beside and renamed."""

    def __init__(self, folder: Path) -> None:
        self._folder = files.made(folder)
        self._spare = self._folder / _SPARE
        self._sent: WeakSet[_OpenFile] = WeakSet()
        """Files that are being sent: one that is dropped meanwhile is not written over."""

    def put(self, update: Update, next_state: NextState | None = None) -> Outgoing:
        """Keep an update, and open what is kept; survives the process, and with a next state a power cut too.

        Raises OSError when the disk does not take it.
        """
        header = update.header.SerializeToString()
        pieces = [_HEAD.pack(update.work, len(header)), header, *update.pieces]
        if next_state is not None:
            # Named by the update's digest, so that it is never taken for another update's.
            pieces += memory_file.encode(update.header.digest.value, [next_state.whole, next_state.unmoved])
        path = self._path(key_of(update.header.key))
        files.write_whole(path, pieces, durable=next_state is not None, over=self._spare)
        self._make_room()
        return self._opened(Head(path, update.work, update.header, _HEAD.size + len(header), next_state is not None))

    def find(self, key: Key, work: bytes) -> Outgoing | None:
        """The update kept for exactly this work; one for other work under the same key is dropped."""
        head = self.head(key)
        if head is None or head.work != work or not _is_whole(head):
            self.drop(key)
            return None
        return self._opened(head)

    def next_state(self, key: Key) -> NextState | None:
        """What the update under a key leaves; None if there is nothing or it is not whole."""
        head = self.head(key)
        return _next_state(head) if head is not None and head.has_state and _is_whole(head) else None

    def head(self, key: Key) -> Head | None:
        """What is kept under a key, without its tensors."""
        return _head(self._path(key))

    def drop(self, key: Key) -> None:
        """Forget an update; nothing happens when there is none."""
        self._retire(self._path(key))

    def forget_spare(self) -> None:
        """Remove what was kept of updates that were dropped: a run has ended, and the next may be far."""
        self._spare.unlink(missing_ok=True)

    def heads(self) -> list[Head]:
        """The updates kept, oldest first."""
        found = sorted(self._folder.glob("*.update"), key=lambda path: (path.stat().st_mtime_ns, path.name))
        return [head for head in map(_head, found) if head is not None]

    def unsettled(self) -> list[training_pb2.ExchangeKey]:
        """Keys of the updates kept, oldest first."""
        return [head.header.key for head in self.heads()]

    def _make_room(self) -> None:
        """The oldest go; but what a client state may have to be made of stays until its outcome is known."""
        plain = [head for head in self.heads() if not head.has_state]
        for head in plain[:-KEPT]:
            self._retire(head.path)

    def _opened(self, head: Head) -> Outgoing:
        file = _OpenFile(head.path, head.start)
        self._sent.add(file)
        return Outgoing(head.header, file.read)

    def _retire(self, path: Path) -> None:
        """Make a file the spare one, unless somebody reads it."""
        if any(file.path == path for file in self._sent):
            path.unlink(missing_ok=True)
            return
        with suppress(FileNotFoundError):
            path.replace(self._spare)

    def _path(self, key: Key) -> Path:
        # The run's id comes from the wire, so it is not trusted as a file name.
        return self._folder / f"{digest_of(repr(key).encode()).hex()[:32]}.update"


def _head(path: Path) -> Head | None:
    try:
        with path.open("rb") as file:
            return _head_of(path, file)
    except (OSError, struct.error, DecodeError):
        return None


def _head_of(path: Path, file: BufferedReader) -> Head | None:
    """The head of an open file, which then stands at the update's data; None if the data is not all there."""
    size = os.fstat(file.fileno()).st_size
    work, length = _HEAD.unpack(file.read(_HEAD.size))
    header = training_pb2.UpdateHeader.FromString(file.read(min(length, size)))
    left = size - file.tell() - header.size_bytes
    return None if left < 0 else Head(path, work, header, file.tell(), has_state=left > 0)


def _is_whole(head: Head) -> bool:
    """Whether the update's data are the bytes of its digest, and what lies behind them too."""
    try:
        with head.path.open("rb", buffering=0) as file:
            file.seek(head.start)
            whole = _digest_of(file, head.header.size_bytes) == digest_bytes(head.header.digest)
        return whole and not (head.has_state and _next_state(head) is None)
    except (OSError, ValueError):
        return False


def _digest_of(file: BinaryIO, size: int) -> bytes:
    """Of so many bytes from where the file stands; fewer if it ends before."""
    hasher, left = blake3(), size
    while data := file.read(min(left, _BLOCK_BYTES)):
        hasher.update(data)
        left -= len(data)
    return hasher.digest()


def _next_state(head: Head) -> NextState | None:
    """None if it is not whole, or another update's."""
    try:
        with head.path.open("rb") as file:
            file.seek(head.start + head.header.size_bytes)
            digest, (whole, unmoved) = memory_file.decode(file, 2)
    except (OSError, struct.error, memory_file.Damaged):
        return None
    return NextState(whole, unmoved) if digest == head.header.digest.value else None
