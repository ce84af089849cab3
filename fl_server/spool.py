"""The bytes of updates on disk, from the first chunk until their round is committed.

    run-ID/round-000012/exchange-0/CLIENT.part             an upload under way, preallocated to its full size
                                   CLIENT.kept             which digest it is for, and the chunks that arrived
                                   CLIENT.<hex>.update     a whole update, named by its digest
    spare/N                                                files of the last round, for the next to write over

A chunk is written once, where it belongs, and then noted in the `.kept` file with its end and checksum. After a restart
the noted chunks are read again and the prefix that has its checksums is kept: a torn page costs its chunk and no more.
The digest of the whole is the caller's to check before `seal`.
"""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from fl_server.spare_files import SpareFiles
from fl_server.spool_parts import Beside, PartFile
from fl_server.store.base import StoreError, StoreFull
from fl_server.store.files import (
    Durability,
    check_id,
    disk_errors,
    make_folders,
    remove_folder,
    run_folder,
    sync_names,
)
from fl_server.store.held_parts import HeldParts, MostHeld
from fl_server.store.kept_prefixes import KeptPrefixes, PartPaths, noted_update

_FOLDERS = re.compile(r"run-(?P<run>[^/]+)/round-(?P<round>\d+)/exchange-(?P<exchange>\d+)")
_FINAL = re.compile(r"(?P<client>.+)\.(?P<digest>(?:[0-9a-f]{2})+)\.update")


class PartBusy(StoreError):
    """Another writer has the upload open: close its PartFile first."""


class PartsHeld(StoreError):
    """The client has as many unfinished uploads as it may, and writes all of them: close one first."""


@dataclass(frozen=True, slots=True)
class SpoolKey:
    """What names one update: at most one of each counts."""

    run_id: str
    round: int
    exchange: int
    client_id: str


@dataclass(frozen=True, slots=True)
class Leftover:
    """An update that lies in the spool at a start."""

    key: SpoolKey
    digest: bytes
    whole: bool
    """Sealed; otherwise an upload under way."""


class UpdateFile:
    """A whole update, open for reading. Plain reads into the caller's memory: a mapped file would count as resident."""

    def __init__(self, path: Path) -> None:
        with disk_errors(f"open the update {path}"):
            self._file = os.open(path, os.O_RDONLY)
            self.size_bytes = os.fstat(self._file).st_size
        self.path = path

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`. StoreError when the file is shorter."""
        buffer = bytearray(size)
        self.read_into(offset, buffer)
        return bytes(buffer)

    def read_into(self, offset: int, buffer: bytearray | memoryview) -> None:
        """Fill a buffer from `offset`, with no copy between. StoreError when the file is shorter."""
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Spool:
    """All updates of one coordinator. Blocking and thread-safe; raises StoreError, and StoreFull when there is no room.

    With durability "power" a sealed update survives a power cut.
    """

    def __init__(
        self, directory: Path | str, durability: Durability = "process", most_held: MostHeld | None = None
    ) -> None:
        """most_held: unfinished uploads that one client may have here."""
        self._directory = Path(directory)
        self._most_held = most_held or MostHeld()
        self._held: HeldParts[SpoolKey] = HeldParts()
        self.prefixes = KeptPrefixes()
        self._durable = durability == "power"
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._parts: dict[SpoolKey, PartFile | None] = {}
        with disk_errors(f"open the spool {self._directory}"):
            make_folders(self._directory, durable=self._durable)
            self._spares = SpareFiles(self._directory / "spare")
            self._beside = Beside(self._spares, self.prefixes, self._durable)
            if self._durable:
                sync_names([self._directory, *(each for each in self._directory.rglob("*") if each.is_dir())])

    def open_part(self, key: SpoolKey, digest: bytes, size: int) -> PartFile:
        """Begin an upload of `size` bytes, or go on with one of the same digest and size; another digest starts over.

        Raises PartBusy while another writer has it, StoreFull when there is no room for the whole, PartsHeld when the
        client writes as many as it may have. One that was sealed already comes back with all its bytes kept.
        """
        paths = self._paths(key, digest)
        if size < 0:
            raise StoreError(f"an update's size is 0 bytes or more; got {size}")
        self._reserve(key)
        part = None
        try:
            self._make_way(key, size)
            # One at a time: who finds a folder there may seal an update in it, and its name must be durable by then.
            with self._making, disk_errors(f"open {paths.part}"):
                make_folders(paths.part.parent, durable=self._durable)
            part = self._opened(paths, digest, size)
            return part
        finally:
            with self._lock:
                if part is None:
                    del self._parts[key]
                else:
                    self._parts[key] = part

    def kept(self, key: SpoolKey, digest: bytes) -> int:
        """Bytes kept from the start of an update with that digest: where its sender goes on."""
        paths = self._paths(key, digest)
        with self._lock:
            part = self._parts.get(key)
        if part is not None and not part.closed:
            return part.kept_bytes if part.digest == digest else 0
        with disk_errors(f"look at {paths.part}"):
            if paths.final.exists():
                return paths.final.stat().st_size
            noted = noted_update(paths.notes)
            return self.prefixes.look(paths, *noted)[0] if noted and noted[0] == digest else 0

    def path(self, key: SpoolKey, digest: bytes) -> Path:
        """Where the whole update lies, or will lie when it is sealed."""
        return self._paths(key, digest).final

    def open_for_reading(self, key: SpoolKey, digest: bytes) -> UpdateFile:
        """A whole update for reading. StoreError if it is not there."""
        return UpdateFile(self.path(key, digest))

    def remove(self, key: SpoolKey, digest: bytes) -> None:
        """Remove one update, whole or not; one that is not there is no error."""
        paths = self._paths(key, digest)
        with disk_errors(f"remove {paths.final}"):
            paths.final.unlink(missing_ok=True)
            paths.remove_part()

    def remove_round(self, run_id: str, round: int) -> None:
        """Remove all updates of a round; an upload still open there can only be closed after that.

        The files of whole updates, which nobody writes into any more, are kept for the next round to write over.
        """
        with self._lock:
            self._held.drop_where(lambda key: (key.run_id, key.round) == (run_id, round))
        folder, doing = self._round(run_id, round), f"remove the spool of run {run_id!r} round {round}"
        with suppress(OSError):  # what cannot be kept is removed: on a full disk above all
            self._spares.give(list(folder.glob("exchange-*/*.update")))
        remove_folder(folder, doing)

    def remove_run(self, run_id: str) -> None:
        """Remove all updates of a run, and what was kept to be written over."""
        self.make_room()
        with self._lock:
            self._held.drop_where(lambda key: key.run_id == run_id)
        remove_folder(run_folder(self._directory, run_id), f"remove the spool of run {run_id!r}")

    def remove_unfinished(self, client_id: str) -> None:
        """Remove what came of a client's uploads, but for those that are being written."""
        with self._lock:
            idle = [key for key in self._held.of(client_id) if not self._written(key)]
            self._held.drop(idle)
            for key in idle:
                self._remove_part(key)

    def make_room(self) -> bool:
        """Let go of the files that are kept to be written over; False if there are none."""
        with disk_errors(f"make room in {self._directory}"):
            return self._spares.clear()

    def sweep(self) -> list[Leftover]:
        """At a start, before any upload is open: all updates here, by path. Parts without notes are removed."""
        found = []
        with disk_errors(f"sweep the spool {self._directory}"):
            for path in sorted(self._directory.glob("run-*/round-*/exchange-*/*")):
                if leftover := self._leftover(path):
                    found.append(leftover)
                    if not leftover.whole:
                        self._held.begun(leftover.key, path.stat().st_size)
                elif path.suffix == ".part" or (path.suffix == ".kept" and not path.with_suffix(".part").exists()):
                    path.unlink()
        return found

    def _opened(self, paths: PartPaths, digest: bytes, size: int) -> PartFile:
        """A part file, if there is room for it once the spare files are gone."""
        try:
            return PartFile(paths, digest, size, self._beside)
        except StoreFull:
            if not self.make_room():
                raise
            return PartFile(paths, digest, size, self._beside)

    def _leftover(self, path: Path) -> Leftover | None:
        """What a file of the spool is, if it can be used; the notes of a good part are told by their part."""
        folders = _FOLDERS.fullmatch(path.parent.relative_to(self._directory).as_posix())
        if folders is None:
            return None
        place = folders["run"], int(folders["round"]), int(folders["exchange"])
        if whole := _FINAL.fullmatch(path.name):
            return Leftover(SpoolKey(*place, whole["client"]), bytes.fromhex(whole["digest"]), whole=True)
        noted = noted_update(path.with_suffix(".kept"))
        if path.suffix == ".part" and noted:
            return Leftover(SpoolKey(*place, path.name.removesuffix(".part")), noted[0], whole=False)
        return None

    def _make_way(self, key: SpoolKey, size: int) -> None:
        """Remove the client's oldest unfinished uploads while there are too many. Raises PartsHeld."""
        with self._lock:
            self._held.drop([each for each in self._held.of(key.client_id) if self._over(each)])
            for other in self._held.too_many(key, size, self._most_held):
                if self._held.too_many(key, size, self._most_held) and not self._written(other):
                    self._remove_part(other)
                    self._held.drop([other])
            if self._held.too_many(key, size, self._most_held):
                raise PartsHeld(f"{key.client_id} writes {len(self._held.of(key.client_id))} uploads already")
            self._held.begun(key, size)

    def _written(self, key: SpoolKey) -> bool:
        """Whether somebody has the upload open; call it with the lock."""
        part = self._parts.get(key)
        return key in self._parts and (part is None or not part.closed)

    def _over(self, key: SpoolKey) -> bool:
        """Whether an upload was sealed or discarded since it was begun; call it with the lock."""
        return not self._written(key) and not self._part_of(key).part.exists()

    def _remove_part(self, key: SpoolKey) -> None:
        with disk_errors(f"remove the upload {key}"):
            self._part_of(key).remove_part()

    def _part_of(self, key: SpoolKey) -> PartPaths:
        return self._paths(key, b"\0")  # an unfinished upload's file is named by its client alone

    def _reserve(self, key: SpoolKey) -> None:
        with self._lock:
            self._parts = {each: part for each, part in self._parts.items() if part is None or not part.closed}
            if key in self._parts:
                raise PartBusy(f"the upload {key} has a writer already: close that one first")
            self._parts[key] = None

    def _round(self, run_id: str, round: int) -> Path:
        if round < 0:
            raise StoreError(f"a round is 0 or more; got {round}")
        return run_folder(self._directory, run_id) / f"round-{round:06d}"

    def _paths(self, key: SpoolKey, digest: bytes) -> PartPaths:
        client = check_id(key.client_id, "a client id")
        if key.exchange < 0 or not 1 <= len(digest) <= 64:
            raise StoreError(
                f"expected an exchange of 0 or more and a digest of 1 to 64 bytes; got exchange {key.exchange} and "
                f"{len(digest)} bytes"
            )
        folder = self._round(key.run_id, key.round) / f"exchange-{key.exchange}"
        final = folder / f"{client}.{digest.hex()}.update"
        return PartPaths(part=folder / f"{client}.part", notes=folder / f"{client}.kept", final=final)
