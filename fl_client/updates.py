"""A finished update, and the folder that keeps it until the coordinator has said what became of it."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import DecodeError

from protos.chunks import Buffer
from protos.digests import digest_bytes, digest_of
from protos.fl.v1 import training_pb2

KEPT = 4
"""Updates kept at most; the oldest go first. A coordinator waits for one at a time."""

_HEAD = struct.Struct("<32sQ")

Assigned = TypeVar("Assigned", training_pb2.Assignment, training_pb2.EvaluationAssignment)

Key = tuple[str, int, int]
"""(run id, round, exchange)."""


def key_of(key: training_pb2.ExchangeKey) -> Key:
    """The key as a value that can be looked up."""
    return (key.run_id, key.round, key.exchange)


def work_of(assignment: Assigned) -> bytes:
    """Digest over all that the answer depends on: equal for a repeat, whatever its attempt, deadline and limits."""
    work = type(assignment)()
    work.CopyFrom(assignment)
    for field in _BESIDE_THE_WORK.intersection(work.DESCRIPTOR.fields_by_name):
        work.ClearField(field)
    return digest_of(work.SerializeToString(deterministic=True))


_BESIDE_THE_WORK = {"attempt", "deadline", "upload_encodings", "max_update_bytes"}


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


class PendingUpdates:
    """Files of updates whose outcome is not known, one for each key, written beside and renamed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        for torn in self._folder.glob("*.part"):
            torn.unlink()

    def put(self, update: Update) -> None:
        """Keep an update; survives the process. Raises OSError when the disk does not take it."""
        header = update.header.SerializeToString()
        path = self._path(key_of(update.header.key))
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            file.writelines((_HEAD.pack(update.work, len(header)), header, update.data))
        part.replace(path)
        for old in self._files()[:-KEPT]:
            old.unlink()

    def find(self, key: Key, work: bytes) -> Update | None:
        """The update kept for exactly this work; one for other work under the same key is dropped."""
        update = _read(self._path(key))
        if update is None or update.work != work:
            self.drop(key)
            return None
        return update

    def drop(self, key: Key) -> None:
        """Forget an update; nothing happens when there is none."""
        with suppress(FileNotFoundError):
            self._path(key).unlink()

    def keys(self) -> list[training_pb2.ExchangeKey]:
        """Keys of the updates kept, oldest first."""
        return [update.header.key for update in map(_read, self._files()) if update is not None]

    def _path(self, key: Key) -> Path:
        # The run's id comes from the wire, so it is not trusted as a file name.
        return self._folder / f"{digest_of(repr(key).encode()).hex()[:32]}.update"

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*.update"), key=lambda path: (path.stat().st_mtime_ns, path.name))


def _read(path: Path) -> Update | None:
    """The update in a file; None if there is none or it is not whole."""
    try:
        with path.open("rb") as file:
            work, length = _HEAD.unpack(file.read(_HEAD.size))
            header = training_pb2.UpdateHeader.FromString(file.read(min(length, os.fstat(file.fileno()).st_size)))
            data = file.read()
        whole = len(data) == header.size_bytes and digest_of(data) == digest_bytes(header.digest)
    except (OSError, struct.error, DecodeError, ValueError):
        return None
    return Update(work, header, data) if whole else None
