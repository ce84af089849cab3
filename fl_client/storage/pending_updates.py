"""A computed update, and the folder that keeps it until its outcome is known."""

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

from fl_client.storage import client_state_store, disk
from fl_client.storage.client_state_store import NextState
from protos.chunks import Buffer
from protos.digests import digest_bytes, digest_of
from protos.fl.v1 import training_pb2

MAX_KEPT = 4
"""Updates without a client state that are kept. A coordinator waits for one at a time. The oldest are removed first."""

_HEAD = struct.Struct("<32sQ")

_BLOCK_BYTES = 1 << 20

_SPARE = f"spare{disk.PART}"
"""The file of a removed update, which the next update overwrites. The start of a daemon removes it."""

Assigned = TypeVar("Assigned", training_pb2.Assignment, training_pb2.EvaluationAssignment)

Key = tuple[str, int, int]
"""(run id, round, exchange)."""


def key_of(key: training_pb2.ExchangeKey) -> Key:
    """The key as a hashable value."""
    return (key.run_id, key.round, key.exchange)


def key_fields(key: Key) -> dict[str, str | int]:
    """The key as fields of a log line."""
    return {"run": key[0], "round": key[1], "exchange": key[2]}


def message_of(key: Key) -> training_pb2.ExchangeKey:
    """The key as a message."""
    return training_pb2.ExchangeKey(run_id=key[0], round=key[1], exchange=key[2])


def work_digest(assignment: Assigned) -> bytes:
    """Digest of all fields that the result depends on. Equal for a repeat with another attempt, deadline or limit."""
    work = type(assignment)()
    work.CopyFrom(assignment)
    for field in _NOT_THE_WORK.intersection(work.DESCRIPTOR.fields_by_name):
        work.ClearField(field)
    for resource in work.resources:
        for field in _NOT_THE_BUNDLE:
            resource.ClearField(field)
    return digest_of(work.SerializeToString(deterministic=True))


def update_digest(assignment: training_pb2.Assignment) -> bytes:
    """Digest of what the values of an update depend on, wherever in a run it is asked for: model, settings, seed."""
    work = training_pb2.Assignment(task=assignment.task, training=assignment.training)
    for resource in assignment.resources:
        work.resources.add(kind=resource.kind, digest=resource.digest)
    return digest_of(work.SerializeToString(deterministic=True))


_NOT_THE_WORK = {"attempt", "deadline", "max_update_bytes", "min_accepted", "traceparent"}
_NOT_THE_BUNDLE = ("difference", "is_base")
"""Other ways to the same bytes. A coordinator that was restarted has no differences for the round under way."""


def name_of(enum: EnumTypeWrapper, number: int) -> str:
    """An enum value's name, or its number where a newer coordinator sends an unknown one."""
    return next((name for name, value in enum.items() if value == number), str(number))


@dataclass(frozen=True, slots=True)
class Update:
    """The result of one assignment, as it is saved and sent."""

    work_digest: bytes
    """Digest of the assignment that it answers."""
    header: training_pb2.UpdateHeader
    """Complete but for session_id and resume_offset."""
    pieces: tuple[Buffer, ...]
    """The payloads in order. They may share the memory of tensors."""


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """An update without a receipt: its bytes are read while it is sent, and are the same each time."""

    header: training_pb2.UpdateHeader
    """Complete but for session_id and resume_offset."""
    read: Callable[[int, int], bytes]
    """Bytes of the payloads, by offset and length. Raises OSError when they cannot be read."""
    begun: bool = False
    """Whether the coordinator may already have a part of it."""

    @staticmethod
    def in_memory(update: Update) -> PendingUpdate:
        """An update that could not be saved."""
        data = b"".join(update.pieces)
        return PendingUpdate(update.header, lambda offset, length: data[offset : offset + length])


class _OpenFile:
    """The payloads in a file, which stays open while they may be read."""

    def __init__(self, path: Path, start: int) -> None:
        self.path, self._start = path, start
        self._descriptor = os.open(path, os.O_RDONLY)
        finalize(self, os.close, self._descriptor)

    def read(self, offset: int, length: int) -> bytes:
        """See `PendingUpdate.read`."""
        if len(data := os.pread(self._descriptor, length, self._start + offset)) < length:
            raise OSError(
                f"expected {length} bytes of the update at {offset}, got {len(data)}: was the file truncated?"
            )
        return data


@dataclass(frozen=True, slots=True)
class UpdateFile:
    """A file of the folder, described without reading its tensors."""

    path: Path
    work_digest: bytes
    header: training_pb2.UpdateHeader
    start: int
    """Offset of the update's data in the file."""
    has_state: bool


class PendingUpdates:
    """Files of updates with an unknown outcome, one for each key, each replaced by one rename."""

    def __init__(self, folder: Path) -> None:
        self._folder = disk.made(folder)
        self._spare = self._folder / _SPARE
        self._sent: WeakSet[_OpenFile] = WeakSet()
        """Files in transfer. One that is removed meanwhile is not overwritten."""

    def put(self, update: Update, next_state: NextState | None = None) -> PendingUpdate:
        """Save an update, and open its file. Durable against a crash, and with a next state against a power cut too.

        Raises OSError when the disk is full or cannot be written.
        """
        header = update.header.SerializeToString()
        pieces = [_HEAD.pack(update.work_digest, len(header)), header, *update.pieces]
        if next_state is not None:
            # The metadata is the update's digest, so that the state is never used with another update.
            pieces += client_state_store.encode(update.header.digest.value, [next_state.at_one, next_state.at_zero])
        path = self._path(key_of(update.header.key))
        disk.write_whole(path, pieces, durable=next_state is not None, over=self._spare)
        self._remove_oldest()
        return self._opened(
            UpdateFile(path, update.work_digest, update.header, _HEAD.size + len(header), next_state is not None)
        )

    def find(self, key: Key, digest: bytes) -> PendingUpdate | None:
        """The update saved for exactly this work. An update for other work under the same key is removed."""
        stored = self.file(key)
        if stored is None or stored.work_digest != digest or not _is_whole(stored):
            self.drop(key)
            return None
        return self._opened(stored, begun=True)

    def next_state(self, key: Key) -> NextState | None:
        """The next state of the update under a key. None if there is none or it is damaged."""
        stored = self.file(key)
        return _next_state(stored) if stored is not None and stored.has_state and _is_whole(stored) else None

    def file(self, key: Key) -> UpdateFile | None:
        """The file of a key, without its tensors."""
        return _read(self._path(key))

    def drop(self, key: Key) -> None:
        """Remove an update, if there is one."""
        self._retire(self._path(key))

    def remove_spare(self) -> None:
        """Remove the file kept to be overwritten: a run has ended, and the next update may take long."""
        self._spare.unlink(missing_ok=True)

    def files(self) -> list[UpdateFile]:
        """The saved updates, oldest first."""
        paths = sorted(self._folder.glob("*.update"), key=lambda path: (path.stat().st_mtime_ns, path.name))
        return [stored for stored in map(_read, paths) if stored is not None]

    def exchange_keys(self) -> list[training_pb2.ExchangeKey]:
        """Keys of the saved updates, oldest first."""
        return [stored.header.key for stored in self.files()]

    def _remove_oldest(self) -> None:
        """Remove the oldest updates. Those with a next client state stay until their outcome is known."""
        plain = [stored for stored in self.files() if not stored.has_state]
        for stored in plain[:-MAX_KEPT]:
            self._retire(stored.path)

    def _opened(self, stored: UpdateFile, *, begun: bool = False) -> PendingUpdate:
        payloads = _OpenFile(stored.path, stored.start)
        self._sent.add(payloads)
        return PendingUpdate(stored.header, payloads.read, begun)

    def _retire(self, path: Path) -> None:
        """Make a file the one to overwrite, unless it is being sent."""
        if any(file.path == path for file in self._sent):
            path.unlink(missing_ok=True)
            return
        with suppress(FileNotFoundError):
            path.replace(self._spare)

    def _path(self, key: Key) -> Path:
        # The run's id comes from the wire, so it is not trusted as a file name.
        return self._folder / f"{digest_of(repr(key).encode()).hex()[:32]}.update"


def _read(path: Path) -> UpdateFile | None:
    try:
        with path.open("rb") as file:
            return _describe(path, file)
    except (OSError, struct.error, DecodeError):
        return None


def _describe(path: Path, file: BufferedReader) -> UpdateFile | None:
    """Describe an open file, and leave its position at the update's data. None if data is missing."""
    size = os.fstat(file.fileno()).st_size
    digest, length = _HEAD.unpack(file.read(_HEAD.size))
    header = training_pb2.UpdateHeader.FromString(file.read(min(length, size)))
    left = size - file.tell() - header.size_bytes
    return None if left < 0 else UpdateFile(path, digest, header, file.tell(), has_state=left > 0)


def _is_whole(stored: UpdateFile) -> bool:
    """Whether the update's data have its digest, and its next state, if any, is not damaged."""
    try:
        with stored.path.open("rb", buffering=0) as file:
            file.seek(stored.start)
            whole = _digest_of(file, stored.header.size_bytes) == digest_bytes(stored.header.digest)
        return whole and not (stored.has_state and _next_state(stored) is None)
    except (OSError, ValueError):
        return False


def _digest_of(file: BinaryIO, size: int) -> bytes:
    """Digest of `size` bytes from the file's position, or of fewer if it ends before."""
    hasher, left = blake3(), size
    while data := file.read(min(left, _BLOCK_BYTES)):
        hasher.update(data)
        left -= len(data)
    return hasher.digest()


def _next_state(stored: UpdateFile) -> NextState | None:
    """None if it is damaged, or belongs to another update."""
    try:
        with stored.path.open("rb") as file:
            file.seek(stored.start + stored.header.size_bytes)
            digest, (at_one, at_zero) = client_state_store.decode(file, 2)
    except (OSError, struct.error, client_state_store.Damaged):
        return None
    return NextState(at_one, at_zero) if digest == stored.header.digest.value else None
