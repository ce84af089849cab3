"""A finished update, and the folder that keeps it until the coordinator has said what became of it."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

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
    """What goes up for one assignment: the same bytes however often it is sent."""

    work: bytes
    """Digest of the assignment that it answers."""
    header: training_pb2.UpdateHeader
    """Complete but for session_id and resume_offset."""
    data: Buffer
    """The payloads, one behind the other."""


@dataclass(frozen=True, slots=True)
class Pending:
    """An update on disk, with what the device will keep of its round should it count."""

    update: Update
    next_state: NextState | None


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of a file without reading its tensors."""

    path: Path
    work: bytes
    header: training_pb2.UpdateHeader
    has_state: bool


class PendingUpdates:
    """Files of updates whose outcome is not known, one for each key, written beside and renamed."""

    def __init__(self, folder: Path) -> None:
        self._folder = files.made(folder)

    def put(self, update: Update, next_state: NextState | None = None) -> None:
        """Keep an update; survives the process, and with a next state a power cut too.

        Raises OSError when the disk does not take it.
        """
        header = update.header.SerializeToString()
        pieces = [_HEAD.pack(update.work, len(header)), header, update.data]
        if next_state is not None:
            # Named by the update's digest, so that it is never taken for another update's.
            pieces += memory_file.encode(update.header.digest.value, [next_state.whole, next_state.unmoved])
        files.write_whole(self._path(key_of(update.header.key)), pieces, durable=next_state is not None)
        self._make_room()

    def find(self, key: Key, work: bytes) -> Update | None:
        """The update kept for exactly this work; one for other work under the same key is dropped."""
        pending = self.read(key)
        if pending is None or pending.update.work != work:
            self.drop(key)
            return None
        return pending.update

    def read(self, key: Key) -> Pending | None:
        """All that is kept under a key; None if there is nothing or it is not whole."""
        return _read(self._path(key))

    def head(self, key: Key) -> Head | None:
        """What is kept under a key, without its tensors."""
        return _head(self._path(key))

    def drop(self, key: Key) -> None:
        """Forget an update; nothing happens when there is none."""
        self._path(key).unlink(missing_ok=True)

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
            head.path.unlink()

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
    return None if left < 0 else Head(path, work, header, has_state=left > 0)


def _read(path: Path) -> Pending | None:
    """What is in a file; None if there is none or it is not whole."""
    try:
        with path.open("rb") as file:
            if (head := _head_of(path, file)) is None:
                return None
            data = file.read(head.header.size_bytes)
            next_state = _next_state(file, head.header) if head.has_state else None
        if digest_of(data) != digest_bytes(head.header.digest):
            return None
    except (OSError, struct.error, DecodeError, ValueError):
        return None
    return Pending(Update(head.work, head.header, data), next_state)


def _next_state(file: BufferedReader, header: training_pb2.UpdateHeader) -> NextState:
    digest, (whole, unmoved) = memory_file.decode(file, 2)
    if digest != header.digest.value:
        raise memory_file.Damaged("expected the next state of this update, got another's")
    return NextState(whole, unmoved)
