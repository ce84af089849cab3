"""The files of one update: an upload under way, with the notes of the chunks that arrived, and a whole update.

Plain reads go into the caller's memory: a mapped file would count as resident memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, Self

import structlog

from fl_common.files import fsync_path
from fl_server.store.errors import StoreError, StoreUnavailable, disk_errors
from fl_server.store.objects.bucket import DamagedObject
from fl_server.store.objects.files import PartSender, StoredFiles, read_bytes
from fl_server.store.spool.kept_files import NOTE, PIECE, KeptPrefixes, PartPaths, SpareFiles, notes_header
from protos.chunks import Buffer, crc32c

log = structlog.get_logger(__name__)

_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class PartBusy(StoreError):
    """Another writer has the upload open: close its PartFile first."""


class SpoolParts(NamedTuple):
    """Parts that all part files of a spool share."""

    spares: SpareFiles
    """Files to overwrite when nothing is kept of the update."""
    prefixes: KeptPrefixes
    durable: bool
    """Whether a sealed update must survive a power cut."""
    files: StoredFiles | None = None
    """The object store that has every whole update; None: the spool is the only place."""


class PartFile:
    """One upload under way, with one writer at a time; made by `Spool.open_part`. Blocking and thread-safe."""

    def __init__(self, paths: PartPaths, digest: bytes, size: int, shared: SpoolParts) -> None:
        self.digest = digest
        self.size_bytes = size
        self._paths = paths
        self._lock = threading.Lock()
        self._spares, self._prefixes, self._durable, self._files = shared
        self._sender: PartSender | None = None
        self._notes: int | None = None
        self._file: int | None = None
        self._kept = 0
        self._at = 0
        self._open()
        if self._files is not None:
            self._begin_sending(self._files)

    @property
    def path(self) -> Path:
        """Current path of the bytes, for checks before `seal`."""
        return self._paths.final if self._notes is None else self._paths.part

    @property
    def kept_bytes(self) -> int:
        """Bytes that arrived from the start, without a gap."""
        return self._kept

    @property
    def closed(self) -> bool:
        """Whether it was closed, sealed or discarded."""
        return self._file is None

    def write(self, offset: int, data: Buffer, crc: int | None = None) -> None:
        """Write a chunk at its place. Bytes that are kept already are skipped. crc: CRC-32C of data, if known.

        Raises ValueError for a chunk that leaves a gap or exceeds the size, and StoreFull when the disk is full; the
        kept bytes stay.
        """
        with self._lock:
            file = self._opened()
            if offset < 0 or offset > self._kept:
                raise ValueError(f"a chunk at offset {offset} leaves a gap: go on at {self._kept}")
            if offset + len(data) > self.size_bytes:
                raise ValueError(f"a chunk ends at {offset + len(data)}, over the update's {self.size_bytes} bytes")
            fresh = memoryview(data)[self._kept - offset :]
            with disk_errors(f"write into {self._paths.part}"):
                if crc is not None and len(fresh) == len(data) <= PIECE:
                    self._write_piece(file, fresh, crc)
                    return
                for start in range(0, len(fresh), PIECE):
                    piece = fresh[start : start + PIECE]
                    self._write_piece(file, piece, crc32c(piece))

    @property
    def sending(self) -> list[Future[str]]:
        """What `seal` waits for: parts on their way into the object store."""
        return [] if self._sender is None else self._sender.under_way

    def seal(self) -> Path:
        """Give the whole update its final name, close it, and return its path. With an object store it is there first.

        The caller has checked the digest. Raises ValueError when bytes are missing.
        """
        with self._lock:
            file = self._opened()
            if self._kept != self.size_bytes:
                raise ValueError(
                    f"the update has {self._kept} of {self.size_bytes} bytes: send the rest before sealing it"
                )
            if self._files is not None and self._sender is not None:
                self._files.count([self._sender.finish(self.digest)])
            with disk_errors(f"seal {self._paths.final}"):
                if self._durable:
                    os.fsync(file)
                if self._notes is not None:
                    self._paths.part.rename(self._paths.final)
                    os.close(self._notes)
                    self._notes = None  # if the rest fails, a second try finds the whole update
                    self._paths.notes.unlink(missing_ok=True)
                if self._durable:
                    fsync_path(self._paths.final.parent)
            self._close()
            if self._files is not None:
                self._files.cache.add(self._paths.final, self.size_bytes)
            return self._paths.final

    def discard(self) -> None:
        """Remove the bytes of the upload, then close it. What is closed may have another writer, whose files stay."""
        with self._lock:
            try:
                with disk_errors(f"discard {self._paths.part}"):
                    if self._file is not None:
                        if self._notes is None:
                            self._paths.final.unlink(missing_ok=True)
                        self._paths.remove_part()
                if self._files is not None:
                    self._files.remove_file(self._files.name(self._paths.final))
            finally:
                self._close()

    def close(self) -> None:
        """Close the upload; the next `open_part` with this digest continues it. A second call does nothing."""
        with self._lock:
            unfinished = self._notes is not None
            self._close()
            if unfinished:
                notes = (self._at - len(notes_header(self.digest, self.size_bytes))) // NOTE.size
                self._prefixes.remember(self._paths, self.digest, self.size_bytes, (self._kept, notes))

    def _open(self) -> None:
        paths = self._paths
        self._fetch_final()
        with disk_errors(f"open {paths.part}"):
            if _size_of(paths.final) == self.size_bytes:  # sealed, but the process ended before the ledger had it
                self._file, self._kept = (os.open(paths.final, os.O_RDWR), self.size_bytes)
                self._lock_file(self._file)
                return
            paths.final.unlink(missing_ok=True)  # another size means that it is torn
            self._kept, noted = self._prefixes.find(paths, self.digest, self.size_bytes)
            try:
                if not self._kept:  # without notes no byte in the file counts, whatever a spare file contains
                    paths.notes.unlink(missing_ok=True)
                    self._spares.take(self.size_bytes, paths.part)
                self._file = os.open(paths.part, os.O_RDWR | os.O_CREAT, 0o600)
                self._lock_file(self._file)
                self._prepare(self._file, noted)
            except OSError:
                self._close()
                if not self._kept:
                    paths.remove_part()
                raise

    def _lock_file(self, file: int) -> None:
        """Let no other process write the file. A worker that was cut off may still have it open. Raises PartBusy."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._close()
            raise PartBusy(f"another process writes {self._paths.part}: end it, or wait until it notices") from error

    def _fetch_final(self) -> None:
        """A whole update that is in the object store, and not here any more, comes back."""
        files = self._files
        stored = None if files is None else files.find(files.name(self._paths.final))
        if files is not None and stored is not None and _size_of(self._paths.final) != self.size_bytes:
            files.fetch(stored, self._paths.final)

    def _prepare(self, file: int, noted: int) -> None:
        """Allocate the whole file, then start the notes behind the valid ones."""
        _allocate(file, self.size_bytes)
        header = notes_header(self.digest, self.size_bytes)
        self._notes = os.open(self._paths.notes, os.O_WRONLY | os.O_CREAT, 0o600)
        _write_all(self._notes, header, 0)
        self._at = len(header) + noted * NOTE.size
        os.ftruncate(self._notes, self._at)

    def _begin_sending(self, files: StoredFiles) -> None:
        """Take from the object store what is missing here, and send what is missing there."""
        name = files.name(self._paths.final)
        if files.find(name) is not None:
            return
        try:
            for number, part in sorted(files.loose(name).items()):
                start = number * files.part_bytes
                if start <= self._kept < start + files.part_bytes and self._kept < self.size_bytes:
                    self.write(start, files.part(name, part))
        except (DamagedObject, ValueError) as error:
            log.warning("part_not_used", name=name, why=str(error))
        self._sender = files.begin(self._paths.final, self.path, self.size_bytes, durable=self._durable)
        self._sender.reached(self._kept)

    def _write_piece(self, file: int, piece: memoryview, crc: int) -> None:
        """Write bytes first, then their note: a note never exists without its bytes, whenever the process ends."""
        _write_all(file, piece, self._kept)
        end = self._kept + len(piece)
        if self._notes is not None:
            self._write_note(self._notes, end, crc)
        self._kept = end
        if self._sender is not None:
            self._sender.reached(end)

    def _write_note(self, notes: int, end: int, crc: int) -> None:
        _write_all(notes, NOTE.pack(end, crc), self._at)
        self._at += NOTE.size

    def _opened(self) -> int:
        if self._file is None:
            raise StoreError(f"the upload {self._paths.part.name} is closed: open it again to go on")
        return self._file

    def _close(self) -> None:
        for descriptor in (self._file, self._notes):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._notes = None


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _allocate(file: int, size: int) -> None:
    """Allocate the space now, so that a full disk shows before bytes arrive. Not every file system can."""
    if size:
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
    os.ftruncate(file, size)


def _write_all(file: int, data: bytes | memoryview, offset: int) -> None:
    """pwrite until everything is written."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


class UpdateFile:
    """A whole update, open for reading."""

    def __init__(self, path: Path) -> None:
        with disk_errors(f"open the update {path}"):
            self._file = os.open(path, os.O_RDONLY)
            self.size_bytes = os.fstat(self._file).st_size
        self.path = path

    def read_into(self, offset: int, buffer: bytearray | memoryview) -> None:
        """Fill a buffer from `offset`, without a copy between. Raises StoreError if the file is shorter."""
        view = memoryview(buffer).cast("B")
        with disk_errors(f"read the update {self.path}"):
            while view:
                count = os.preadv(self._file, [view], offset)
                if not count:
                    raise StoreError(f"the update {self.path} ends at {offset}, {len(view)} bytes short: it is torn")
                view, offset = view[count:], offset + count

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StoredUpdate:
    """A whole update in the object store. Its local file may be gone; then its bytes are read from the store."""

    def __init__(self, path: Path, files: StoredFiles) -> None:
        self.path, self._files = path, files

    def read(self, offset: int, size: int) -> bytes:
        """Bytes of the update; fewer at its end. Raises StoreError, and StoreUnavailable while the store fails.

        An update with damaged bytes counts no more, so that its client is asked for it again at the next start.
        """
        files, name = self._files, self._files.name(self.path)
        try:
            with disk_errors(f"read the update {self.path}"):
                data = read_bytes(self.path, offset, size)
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            if (stored := files.find(name)) is None:
                raise StoreUnavailable(
                    f"{name} is gone: start the coordinator again, which asks for it again"
                ) from error
            try:
                return files.read(stored, offset, size)
            except DamagedObject:
                files.remove_file(name)
                raise
        files.cache.used(self.path)
        return data


SpoolSource = Path | StoredUpdate
"""What the bytes of a whole update are read from."""
