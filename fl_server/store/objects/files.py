"""Files in an object store: cut into parts of 5 MiB, counted by the ledger, and removed by it.

    LEDGER/spool/run-ID/round-000012/exchange-0/CLIENT.HEX.update/00003.7-41.<hex>

A part's key has the id of the ledger, the path of the file in the state directory, the part's number, the epoch of the
coordinator that put it, a count, and its BLAKE3-256. So each key is written once, and every read is checked. A part is
loose until a file counts that consists of it. The loose parts of an upload stay when the coordinator is killed, and the
upload continues behind the last whole one, on any machine.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import count, takewhile
from pathlib import Path

import structlog
from blake3 import blake3

from fl_common.files import make_folders
from fl_server.store.database.store import StoredFile
from fl_server.store.errors import StoreError, StoreTakenOver, StoreUnavailable, disk_errors, file_digest
from fl_server.store.ledger import Ledger
from fl_server.store.objects.bucket import Bucket, ObjectReader
from fl_server.store.objects.local_cache import LocalCache

log = structlog.get_logger(__name__)

PART_BYTES = 5 << 20
"""Bytes of a part: what an upload may have to send again after the loss of the local disk."""
CACHED_PARTS = "cached-parts"
"""The folder of parts that were read, in the state directory."""
REMOVALS_EVERY_S = 5.0
_LOOKED_AT = 3


class StoredFiles(ObjectReader):
    """The files of one coordinator in an object store. Blocking and thread-safe.

    Raises StoreUnavailable while the store fails, and StoreTakenOver.
    """

    def __init__(
        self, bucket: Bucket, ledger: Ledger, state_dir: Path, cache: LocalCache, *, shared: bool = False
    ) -> None:
        """Read what the ledger counts, and find the loose parts of uploads. shared: workers put some of them, too."""
        super().__init__(bucket, ledger.store.claim.coordinator_id)
        self.cache, self._ledger, self._state_dir = cache, ledger, state_dir
        self.epoch, self._shared = ledger.store.claim.epoch, shared
        self.part_bytes = PART_BYTES
        self._cached = state_dir / CACHED_PARTS
        cache.empty(self._cached)
        self._counts = count()
        self._lock = threading.Lock()
        self._files = {file.name: file for file in ledger.call(ledger.store.stored_files)}
        self._loose: dict[str, dict[str, int]] = {}
        """The sizes of the loose parts, by the name of the file and the end of the key."""
        self._unsure = deque[str]()
        """Keys of parts whose request failed: they are used no more, and may be there, if only the answer was lost."""
        self._check_there()
        bucket.remove_temporary()
        self.learn("spool")
        if ledger.store.claim.moves:
            self._move()

    # What there is.

    def find(self, name: str) -> StoredFile | None:
        """The file with this path in the state directory; None if none counts."""
        return self._files.get(name)

    def name(self, path: Path) -> str:
        """The name of the file that belongs at this path."""
        return path.relative_to(self._state_dir).as_posix()

    def names(self, folder: str) -> list[str]:
        """The files that count in a folder and the folders in it."""
        with self._lock:
            return [name for name in self._files if name.startswith(f"{folder}/")]

    def unfinished(self, folder: str) -> list[str]:
        """The files in a folder of which there are loose parts only."""
        with self._lock:
            return [name for name in self._loose if name.startswith(f"{folder}/") and name not in self._files]

    def loose(self, name: str) -> dict[int, str]:
        """The loose parts of a file by number."""
        with self._lock:
            return {_number(part): part for part in self._loose.get(name, ())}

    def to_continue(self, name: str) -> list[str]:
        """The parts behind which an upload of a file goes on.

        All of them if the file counts: its coordinator was killed before the verdict.
        """
        whole = self.find(name)
        return list(self.loose(name).values()) if whole is None else list(whole.parts)

    def kept(self, name: str) -> int:
        """Bytes from the start that the store has of a file, whole or not."""
        if (file := self.find(name)) is not None:
            return file.size_bytes
        with self._lock:
            sizes = {_number(part): size for part, size in self._loose.get(name, {}).items()}
        return sum(sizes[number] for number in takewhile(sizes.__contains__, count()))

    def is_whole(self, file: StoredFile) -> bool:
        """Whether all parts of a file are there with their sizes. Their digests are checked when they are read."""
        there = dict(self.bucket.keys(f"{self.root}/{file.name}"))
        return all(there.get(self._key(key)) == size for key, (_, size) in zip(file.keys, _spans(file), strict=True))

    # Writing.

    def begin(self, path: Path, reading: Path, size: int, *, durable: bool = False) -> PartSender:
        """Begin to put the file that belongs at `path`, whose bytes are in `reading`."""
        return PartSender(self, self.name(path), reading, size, durable=durable)

    def put_files(self, paths: Sequence[Path]) -> None:
        """Put whole files and let all of them count at once, durably."""
        senders = [self.begin(path, path, path.stat().st_size, durable=True) for path in paths]
        for sender in senders:
            sender.reached(sender.size_bytes)
        self.count([sender.finish(file_digest(sender.reading)) for sender in senders], fsynced=True)

    def count(self, files: Sequence[StoredFile], *, fsynced: bool = False) -> None:
        """Let files count."""
        self._ledger.call(self._ledger.store.add_stored_files, files, fsynced=fsynced)
        unused: list[str] = []
        with self._lock:
            for file in files:
                self._files[file.name] = file
                others = {part: size for part, size in self._loose.pop(file.name, {}).items() if part not in file.parts}
                if others:  # known until their removal is written: the ledger may be away, and nobody else finds them
                    self._loose[file.name] = others
                    unused += (f"{file.name}/{part}" for part in others)
        self._removed([], unused)

    def send(self, name: str, number: int, data: bytes, *, durable: bool) -> str:
        """Put a part, unless it is there. Returns the end of its key."""
        digest = blake3(data).hexdigest()
        with self._lock:
            for part in self._loose.get(name, ()):
                if _number(part) == number and part.endswith(f".{digest}"):
                    return part
        part = f"{number:05d}.{self.epoch}-{next(self._counts)}.{digest}"
        try:
            self.bucket.put(self._key(f"{name}/{part}"), data, durable=durable)
        except StoreError:
            self._unsure.append(f"{name}/{part}")
            raise
        with self._lock:
            self._loose.setdefault(name, {})[part] = len(data)
        return part

    def submit(self, name: str, reading: Path, span: tuple[int, int, int], *, durable: bool) -> Future[str]:
        """Put a part in a thread. span: its number, first byte and size."""
        number, start, size = span
        return self._pool.submit(lambda: self.send(name, number, read_bytes(reading, start, size), durable=durable))

    # Reading.

    def read(self, file: StoredFile, start: int, size: int) -> bytes:
        """Bytes of a file, through the local copies of its parts. Raises DamagedObject."""
        read = bytearray()
        while size > 0 and start < file.size_bytes:
            number, offset = divmod(start, file.part_bytes)
            length = min(size, file.part_bytes - offset, file.size_bytes - start)
            read += self._part_range(file, number, offset, length)
            start, size = start + length, size - length
        return bytes(read)

    def _part_range(self, file: StoredFile, number: int, offset: int, length: int) -> bytes:
        copy = self._cached / blake3(file.keys[number].encode()).hexdigest()
        try:
            data = read_bytes(copy, offset, length)
            self.cache.used(copy)
        except FileNotFoundError:
            part = self.part(file.name, file.parts[number])
            with disk_errors(f"keep a copy of {file.name}"):
                make_folders(copy.parent, durable=False)
                temporary = copy.with_name(f"{copy.name}.{threading.get_ident()}")
                temporary.write_bytes(part)
                temporary.replace(copy)
            self.cache.add(copy, len(part))
            return part[offset : offset + length]
        return data

    # Removal.

    def remove(self, folder: str) -> None:
        """Let the files of a folder count no more, and remove their objects later."""
        if self._shared:
            with suppress(StoreUnavailable):  # the next start finds what is left
                self.learn(folder)
        with self._lock:
            names = [name for name in self._files if name.startswith(f"{folder}/")]
            loose = [name for name in self._loose if name.startswith(f"{folder}/")]
        self._removed(names, [f"{name}/{part}" for name in loose for part in self._loose.get(name, ())])
        self.cache.forget(self._state_dir / folder)

    def remove_file(self, name: str) -> None:
        """The same for one file."""
        self._removed([name], [f"{name}/{part}" for part in self._loose.get(name, ())])
        self.cache.forget(self._state_dir / name)

    def _removed(self, names: Iterable[str], loose: Sequence[str]) -> None:
        """Write a removal. `remove_objects` does it."""
        known = [name for name in names if name in self._files]
        if not known and not loose:
            return
        self._ledger.call(self._ledger.store.remove_stored_files, known, loose)
        gone = set(loose)
        with self._lock:
            for name in known:
                self._files.pop(name, None)
            for name in {key.rpartition("/")[0] for key in loose}:
                left = {part: size for part, size in self._loose.pop(name, {}).items() if f"{name}/{part}" not in gone}
                if left:
                    self._loose[name] = left

    def remove_objects(self, most: int = 1000) -> bool:
        """Remove objects whose removal is written. Returns whether there may be more."""
        if unsure := list(self._unsure):
            self._removed([], unsure)
            for _ in unsure:
                self._unsure.popleft()
        keys = self._ledger.call(self._ledger.store.object_removals, most)
        if keys:
            self.bucket.delete([self._key(key) for key in keys])
            self._ledger.call(self._ledger.store.objects_removed, keys)
        return len(keys) == most

    async def keep_removing(self) -> None:
        """Remove objects for as long as this is awaited. A failure leaves them to the next try."""
        work: list[Callable[[], bool]] = [self.remove_leftovers, self.remove_objects]
        while work:
            try:
                while await asyncio.to_thread(work[0]):
                    pass
            except StoreTakenOver:
                return
            except StoreError as error:
                log.warning("objects_not_removed", error=str(error))
            else:
                work = work[-1:]
            await asyncio.sleep(REMOVALS_EVERY_S)

    def remove_leftovers(self) -> bool:
        """Have objects removed that an earlier coordinator put and of which no file was made, but for uploads."""
        counted = {key for file in list(self._files.values()) for key in file.keys}
        there = [key for folder in ("checkpoints", "privacy", "releases") for key in self._keys(folder)]
        keys = [key for key, _ in there if key not in counted and _epoch(key) < self.epoch]
        self._removed([], keys)
        return False

    # At the start.

    def _keys(self, folder: str) -> list[tuple[str, int]]:
        """The keys of all objects in a folder, below the ledger's, and their sizes."""
        return [(key.partition("/")[2], size) for key, size in self.bucket.keys(f"{self.root}/{folder}")]

    def _check_there(self) -> None:
        """Raises StoreError if the store has nothing of what counts: the wrong one, or a folder that is not mounted."""
        some = list(self._files.values())[:_LOOKED_AT]
        if some and not any(self.is_whole(file) for file in some):
            raise StoreError(
                f"{self.bucket.url} has no {some[0].name}, which the ledger counts: mount the folder, or restore the "
                "objects"
            )

    def learn(self, folder: str) -> None:
        """Find the loose parts of uploads in a folder, or of one file. Those whose removal is written are removed."""
        going = set(self._ledger.call(self._ledger.store.object_removals, 1 << 31))
        there = self._keys(folder)
        with self._lock:
            counted = {key for file in self._files.values() for key in file.keys}
            for key, size in there:
                if key not in counted and key not in going:
                    name, _, part = key.rpartition("/")
                    self._loose.setdefault(name, {})[part] = size

    def _move(self) -> None:
        """Put the files of the state directory into the store, for a ledger that had none until now."""
        folders = [*self._state_dir.glob("checkpoints/run-*/round-*"), *self._state_dir.glob("spool/run-*/*/*")]
        started = [*self._state_dir.glob("checkpoints/run-*/start.safetensors"), *self._state_dir.glob("releases/*")]
        for paths in (started, *(sorted(folder.iterdir()) for folder in folders if not folder.suffix)):
            self.put_files([path for path in paths if path.suffix not in {".part", ".kept"}])
        self._ledger.call(self._ledger.store.moved_to, self.bucket.url)
        log.info("files_moved", storage=self.bucket.url, files=len(self._files))


class PartSender:
    """Puts the parts of one file while its bytes arrive. Used by one thread at a time."""

    def __init__(self, files: StoredFiles, name: str, reading: Path, size: int, *, durable: bool) -> None:
        self.size_bytes, self.reading = size, reading
        self._files, self._name, self._durable = files, name, durable
        self._sent: dict[int, Future[str]] = {}

    def reached(self, kept: int) -> None:
        """So many bytes are in the file from its start."""
        whole = (
            -(-self.size_bytes // self._files.part_bytes) if kept == self.size_bytes else kept // self._files.part_bytes
        )
        for number in range(len(self._sent), whole):
            self._submit(number)

    @property
    def under_way(self) -> list[Future[str]]:
        """What `finish` has to wait for."""
        return [sent for sent in self._sent.values() if not sent.done()]

    def finish(self, digest: bytes) -> StoredFile:
        """The file, once all its parts are put. Raises StoreUnavailable; then a second call puts what is missing."""
        self.reached(self.size_bytes)
        for number, sent in self._sent.items():
            if sent.cancelled() or (sent.done() and sent.exception() is not None):
                self._submit(number)
        parts = tuple(self._sent[number].result() for number in sorted(self._sent))
        return StoredFile(self._name, self.size_bytes, digest, self._files.part_bytes, parts)

    def _submit(self, number: int) -> None:
        start = number * self._files.part_bytes
        span = (number, start, min(self._files.part_bytes, self.size_bytes - start))
        self._sent[number] = self._files.submit(self._name, self.reading, span, durable=self._durable)


def _spans(file: StoredFile) -> list[tuple[int, int]]:
    """First byte and size of each part."""
    starts = range(0, len(file.parts) * file.part_bytes, file.part_bytes)
    return [(start, min(file.part_bytes, file.size_bytes - start)) for start in starts]


def _number(part: str) -> int:
    return int(part.partition(".")[0])


def _epoch(key: str) -> int:
    return int(key.rpartition("/")[2].split(".")[1].partition("-")[0])


def read_bytes(path: Path, start: int, size: int) -> bytes:
    """Bytes of a file. Raises OSError, StoreError: it is gone, or shorter."""
    file = os.open(path, os.O_RDONLY)
    try:
        data = os.pread(file, size, start)
    finally:
        os.close(file)
    if len(data) != size:
        raise StoreError(f"expected {size} bytes of {path} from {start} on, got {len(data)}")
    return data
