"""What the spool keeps beside whole updates: the prefixes of unfinished uploads, and spare files.

The notes of an upload name its update and list each chunk that arrived, by its end and its CRC-32C. Checking all chunks
costs as much as the upload itself. The result is therefore cached while the process lives and the sizes and times of
the file and its notes stay the same.

Spare files are those of earlier rounds, kept to be overwritten: a new file needs new pages, and these have theirs.
Writing 45 MB over an existing file takes the kernel a fraction of the time that a new file takes, and renaming a file
is faster than removing it. The old content is never read: only the notes of an upload say which bytes arrived.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import struct
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from fl_common.files import make_folders
from fl_common.settings import parse_json
from protos.chunks import crc32c

NOTE = struct.Struct("<QI")
"""A chunk that arrived: its end offset and its CRC-32C."""
PIECE = 1 << 20
_MOST = 16_384
"""Cached results. The oldest one is dropped first; its file is read again when needed."""

_Mark = tuple[int, ...]
Kept = tuple[int, int]
"""Bytes kept from the start, and the number of their notes."""


@dataclass(frozen=True, slots=True)
class PartPaths:
    """Paths of one update: the unfinished upload, its notes, and the whole update."""

    part: Path
    notes: Path
    final: Path

    def remove_part(self) -> None:
        """Remove the unfinished upload. The notes go first: a part without notes is never trusted."""
        self.notes.unlink(missing_ok=True)
        self.part.unlink(missing_ok=True)


def kept_prefix(paths: PartPaths, digest: bytes, size: int) -> Kept:
    """Bytes of an unfinished upload that match their notes, and the number of notes; (0, 0) for another update."""
    header = notes_header(digest, size)
    try:
        notes = paths.notes.read_bytes()
        file = os.open(paths.part, os.O_RDONLY)
    except FileNotFoundError:
        return 0, 0
    try:
        kept = count = 0
        if notes.startswith(header):
            body = notes[len(header) :]
            for end, expected in NOTE.iter_unpack(body[: len(body) // NOTE.size * NOTE.size]):
                if not kept < end <= min(size, kept + PIECE) or not _holds(file, (kept, end), expected):
                    break
                kept, count = end, count + 1
        return kept, count
    finally:
        os.close(file)


def noted_update(notes: Path) -> tuple[bytes, int] | None:
    """Digest and size of the update that the notes name; None without valid notes."""
    try:
        with notes.open("rb") as file:
            header = parse_json(file.readline(512))
        return bytes.fromhex(header["digest"]), int(header["size_bytes"])
    except (FileNotFoundError, ValueError, TypeError, KeyError, OverflowError):
        return None


def _holds(file: int, span: tuple[int, int], expected: int) -> bool:
    start, end = span
    data = os.pread(file, end - start, start)
    return len(data) == end - start and crc32c(data) == expected


def notes_header(digest: bytes, size: int) -> bytes:
    """The first line of an update's notes."""
    return json.dumps({"digest": digest.hex(), "size_bytes": size}).encode() + b"\n"


class KeptPrefixes:
    """Caches the results of `kept_prefix`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[Path, tuple[bytes, _Mark, Kept]] = OrderedDict()
        self.reads = 0
        """Number of files read."""

    def find(self, paths: PartPaths, digest: bytes, size: int) -> Kept:
        """The result of `kept_prefix`, but an unchanged file is not read again."""
        header, mark = notes_header(digest, size), _mark(paths)
        with self._lock:
            before = self._found.get(paths.part)
        if mark is not None and before is not None and before[:2] == (header, mark):
            return before[2]
        kept = kept_prefix(paths, digest, size)
        with self._lock:
            self.reads += 1
        self._remember(paths.part, header, mark if mark == _mark(paths) else None, kept)
        return kept

    def remember(self, paths: PartPaths, digest: bytes, size: int, kept: Kept) -> None:
        """Store the result of a writer that has just closed the file."""
        self._remember(paths.part, notes_header(digest, size), _mark(paths), kept)

    def _remember(self, part: Path, header: bytes, mark: _Mark | None, kept: Kept) -> None:
        with self._lock:
            self._found.pop(part, None)
            if mark is None:
                return
            self._found[part] = (header, mark, kept)
            if len(self._found) > _MOST:
                self._found.popitem(last=False)


def _mark(paths: PartPaths) -> _Mark | None:
    """Values that change with every write; None if one of the files is missing."""
    try:
        states = (paths.part.stat(), paths.notes.stat())
    except FileNotFoundError:
        return None
    return tuple(
        value for state in states for value in (state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    )


MOST_BYTES = 4 << 30
"""Largest total size, for any cohort: operators must not lose their disk space to spare files."""


class SpareFiles:
    """A folder of spare files. Thread-safe; raises OSError."""

    def __init__(self, folder: Path, *, keep: bool = False) -> None:
        """Remove the files of an earlier process. keep: they are of another one, which uses them."""
        self._folder = folder
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._spares: dict[int, list[Path]] = {}
        if folder.exists() and not keep:
            shutil.rmtree(folder)

    def add(self, paths: list[Path]) -> None:
        """Keep files that are not open. Unused older files of the same size are removed."""
        by_size: dict[int, list[Path]] = {}
        for path in paths:
            by_size.setdefault(path.stat().st_size, []).append(path)
        with self._lock:
            for size, given in by_size.items():
                self._remove(self._spares.pop(size, []))
                room = (MOST_BYTES - self._bytes()) // max(size, 1)
                self._spares[size] = [self._renamed(path) for path in given[: max(room, 0)]]

    def take(self, size: int, path: Path) -> bool:
        """Move a spare file of exactly this size to the path, over a file there. Returns False if there is none."""
        with self._lock:
            if not (spares := self._spares.get(size)):
                return False
            spares.pop().replace(path)
            return True

    def clear(self) -> bool:
        """Remove all spare files. Returns False if there were none."""
        with self._lock:
            paths = [path for spares in self._spares.values() for path in spares]
            self._spares.clear()
            self._remove(paths)
            return bool(paths)

    def _renamed(self, path: Path) -> Path:
        make_folders(self._folder, durable=False)
        spare = self._folder / str(next(self._numbers))
        return path.replace(spare)

    def _bytes(self) -> int:
        return sum(size * len(spares) for size, spares in self._spares.items())

    def _remove(self, paths: list[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
