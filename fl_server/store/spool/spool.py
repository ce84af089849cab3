"""The bytes of updates on disk, from the first chunk until their round is committed.

    run-ID/round-000012/exchange-0/CLIENT.part             an upload under way, preallocated to its full size
                                   CLIENT.kept             its notes: the digest, and the chunks that arrived
                                   CLIENT.<hex>.update     a whole update, named by its digest
    spare/N                                                files of the last round, which the next round overwrites

A chunk is written once, at its final place, and then noted in the `.kept` file with its end and checksum. After a
restart the noted chunks are read again, and the prefix with valid checksums is kept: a torn page costs one chunk. The
caller checks the digest of the whole file before `seal`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from fl_common.files import fsync_path, make_folders
from fl_server.store.errors import (
    Durability,
    NoOpenFiles,
    StoreError,
    StoreFull,
    check_id,
    disk_errors,
    file_digest,
    remove_folder,
    run_folder,
)
from fl_server.store.objects.files import StoredFiles
from fl_server.store.spool.kept_files import KeptPrefixes, PartPaths, SpareFiles, noted_update
from fl_server.store.spool.part_file import PartBusy, PartFile, SpoolParts, StoredUpdate

_FOLDERS = re.compile(r"run-(?P<run>[^/]+)/round-(?P<round>\d+)/exchange-(?P<exchange>\d+)")
_FINAL = re.compile(r"(?P<client>.+)\.(?P<digest>(?:[0-9a-f]{2})+)\.update")


def _never() -> bool:
    return False


class TooManyUnfinished(StoreError):
    """The client has the maximum of unfinished uploads open: close one first."""


@dataclass(frozen=True, slots=True)
class SpoolKey:
    """The name of an update. At most one update of each name counts."""

    run_id: str
    round: int
    exchange: int
    client_id: str


@dataclass(frozen=True, slots=True)
class Leftover:
    """An update that is in the spool when the coordinator starts."""

    key: SpoolKey
    digest: bytes
    whole: bool
    """Whether it is sealed; otherwise it is an upload under way."""


@dataclass(frozen=True, slots=True)
class UnfinishedLimit:
    """Unfinished uploads that one client may have."""

    files: int = 4
    bytes: int = 4096 << 20
    """A single upload may be larger."""


class _UnfinishedUploads:
    """Unfinished uploads by client, oldest first. The spool's lock guards it.

    A sealed or discarded upload stays until its client begins the next one, or its round is over.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, dict[SpoolKey, int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._sizes.values()))

    def add(self, key: SpoolKey, size: int) -> None:
        """An upload begins or continues."""
        self._sizes.setdefault(key.client_id, {})[key] = size

    def of(self, client_id: str) -> list[SpoolKey]:
        """The uploads of a client."""
        return list(self._sizes.get(client_id, ()))

    def drop(self, keys: Iterable[SpoolKey]) -> None:
        """Remove these uploads."""
        for key in list(keys):
            sizes = self._sizes.get(key.client_id, {})
            sizes.pop(key, None)
            if not sizes:
                self._sizes.pop(key.client_id, None)

    def of_run(self, run_id: str) -> list[SpoolKey]:
        """The uploads for a run."""
        return [key for sizes in self._sizes.values() for key in sizes if key.run_id == run_id]

    def excess(self, key: SpoolKey, size: int, limit: UnfinishedLimit) -> list[SpoolKey]:
        """The client's other uploads, oldest first, if they and this one exceed the limit; otherwise nothing."""
        others = {other: bytes_ for other, bytes_ in self._sizes.get(key.client_id, {}).items() if other != key}
        fits = len(others) < limit.files and sum(others.values()) + size <= limit.bytes
        return [] if fits else list(others)


class Spool:
    """All updates of one coordinator. Blocking and thread-safe. Raises StoreError, and StoreFull when the disk is full.

    With durability "power" a sealed update survives a power cut.
    """

    def __init__(
        self,
        directory: Path | str,
        durability: Durability = "process",
        unfinished_limit: UnfinishedLimit | None = None,
        files: StoredFiles | None = None,
        *,
        shared: bool = False,
    ) -> None:
        """unfinished_limit: of each client. files: the object store that has every whole update, if there is one.

        shared: another process keeps order in the directory, and reserves each upload there.
        """
        self._directory, self._files = Path(directory), files
        self._unfinished_limit = unfinished_limit or UnfinishedLimit()
        self._unfinished = _UnfinishedUploads()
        self.prefixes = KeptPrefixes()
        self._durable = durability == "power"
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._parts: dict[SpoolKey, PartFile | None] = {}
        with disk_errors(f"open the spool {self._directory}"):
            make_folders(self._directory, durable=self._durable)
            self._spares = SpareFiles(self._directory / "spare", keep=shared)
            self._shared = SpoolParts(self._spares, self.prefixes, self._durable, files)
            if self._durable:
                # A process may have been killed between a rename and its fsync. This one relies on the names it finds.
                for folder in (self._directory, *(path for path in self._directory.rglob("*") if path.is_dir())):
                    fsync_path(folder)

    def open_part(self, key: SpoolKey, digest: bytes, size: int, is_over: Callable[[], bool] = _never) -> PartFile:
        """Begin an upload of `size` bytes, or continue one of the same digest and size. Another digest starts over.

        is_over: whether the run has ended. Its files may have been removed while this waited for a thread, and nobody
        would remove these later.

        Raises PartBusy while another writer has it open, StoreFull when the disk has no room for the whole update,
        TooManyUnfinished when the client has too many open, and StoreError if the run is over. A sealed update comes
        back with all its bytes kept.
        """
        paths = self._paths(key, digest)
        if size < 0:
            raise StoreError(f"an update's size is 0 bytes or more; got {size}")
        self._reserve(key)
        part = None
        try:
            self._make_place(key, paths, size)
            opened = self._opened(paths, digest, size)
            if is_over():
                opened.close()
                self._refuse_over(key)
            part = opened
            return part
        finally:
            with self._lock:
                if part is None:
                    del self._parts[key]
                else:
                    self._parts[key] = part

    def reserve(self, key: SpoolKey, digest: bytes, size: int, is_over: Callable[[], bool] = _never) -> None:
        """Let another process write this upload, which has the folder too, until `free`.

        What nothing of is kept gets a spare file. is_over, and what is raised: as of `open_part`.
        """
        paths = self._paths(key, digest)
        self._reserve(key)
        try:
            self._make_place(key, paths, size, spare=True)
            if is_over():
                self._refuse_over(key)
        except BaseException:
            self.free(key)
            raise

    def _refuse_over(self, key: SpoolKey) -> NoReturn:
        self.remove_run(key.run_id)
        raise StoreError(f"the upload {key} is of a run that is over: nothing more is kept of it")

    def free(self, key: SpoolKey) -> None:
        """The other process does not write the upload any more."""
        with self._lock:
            self._parts.pop(key, None)

    def kept(self, key: SpoolKey, digest: bytes) -> int:
        """Bytes kept from the start of an update with that digest: the offset at which its sender continues."""
        paths = self._paths(key, digest)
        with self._lock:
            part = self._parts.get(key)
        if part is not None and not part.closed:
            return part.kept_bytes if part.digest == digest else 0
        with disk_errors(f"read {paths.part}"):
            if paths.final.exists():
                return paths.final.stat().st_size
            noted = noted_update(paths.notes)
            kept = self.prefixes.find(paths, *noted)[0] if noted and noted[0] == digest else 0
        return kept if self._files is None else max(kept, self._files.kept(self._files.name(paths.final)))

    def source(self, key: SpoolKey, digest: bytes) -> Path | StoredUpdate:
        """What the bytes of an admitted update are read from."""
        path = self.path(key, digest)
        return path if self._files is None else StoredUpdate(path, self._files)

    def is_whole(self, key: SpoolKey, digest: bytes) -> bool:
        """Whether the bytes of an admitted update are there. Raises NoOpenFiles, and StoreUnavailable."""
        path, files = self.path(key, digest), self._files
        stored = None if files is None else files.find(files.name(path))
        if files is not None and stored is None:
            return False
        try:
            if file_digest(path) == digest:
                return True
        except NoOpenFiles:
            raise  # nothing is known about the update
        except (OSError, StoreError):
            pass
        if files is None or stored is None:
            return False
        with disk_errors(f"remove {path}"):
            path.unlink(missing_ok=True)
        return files.is_whole(stored)

    def path(self, key: SpoolKey, digest: bytes) -> Path:
        """Path of the whole update, also before it is sealed."""
        return self._paths(key, digest).final

    def remove_round(self, run_id: str, round: int) -> None:
        """Remove all updates of a round. An upload that is still open there can only be closed afterwards.

        The files of whole updates, which have no writer, are kept: the next round overwrites them.
        """
        with self._lock:
            self._unfinished.drop(key for key in self._unfinished.of_run(run_id) if key.round == round)
        folder, doing = self._round(run_id, round), f"remove the spool of run {run_id!r} round {round}"
        if self._files is not None:
            self._files.remove(self._files.name(folder))
        with suppress(OSError):  # files that cannot be kept, as on a full disk, are removed below
            self._spares.add(list(folder.glob("exchange-*/*.update")))
        remove_folder(folder, doing)

    def remove_run(self, run_id: str) -> None:
        """Remove all updates of a run, and the spare files."""
        self.make_room()
        with self._lock:
            self._unfinished.drop(self._unfinished.of_run(run_id))
        folder = run_folder(self._directory, run_id)
        if self._files is not None:
            self._files.remove(self._files.name(folder))
        remove_folder(folder, f"remove the spool of run {run_id!r}")

    def remove_unfinished(self, client_id: str) -> None:
        """Remove a client's unfinished uploads, except those that are open."""
        with self._lock:
            idle = [key for key in self._unfinished.of(client_id) if not self._is_open(key)]
            self._unfinished.drop(idle)
            for key in idle:
                self._remove_part(key)

    def make_room(self) -> bool:
        """Remove the spare files. Returns False if there are none."""
        with disk_errors(f"make room in {self._directory}"):
            return self._spares.clear()

    def sweep(self, run_id: str = "*") -> list[Leftover]:
        """The updates of a run, or of all, by path. Called at the start, before any upload is open.

        Parts without notes are removed.
        """
        leftovers = []
        with disk_errors(f"sweep the spool {self._directory}"):
            for path in sorted(self._directory.glob(f"run-{run_id}/round-*/exchange-*/*")):
                if leftover := self._leftover(path):
                    leftovers.append(leftover)
                    if not leftover.whole:
                        self._unfinished.add(leftover.key, path.stat().st_size)
                elif path.suffix == ".part" or (path.suffix == ".kept" and not path.with_suffix(".part").exists()):
                    path.unlink()
        return leftovers if self._files is None else self._with_stored(leftovers, self._files, run_id)

    def _with_stored(self, leftovers: list[Leftover], files: StoredFiles, run_id: str) -> list[Leftover]:
        """These, and what only the object store has."""
        known = {(leftover.key, leftover.digest) for leftover in leftovers}
        folder = files.name(self._directory) if run_id == "*" else files.name(run_folder(self._directory, run_id))
        for name in sorted({*files.names(folder), *files.unfinished(folder)}):
            path = self._directory / Path(name).relative_to(files.name(self._directory))
            found = self._leftover(path)
            if found is not None and (found.key, found.digest) not in known:
                whole = files.find(name) is not None
                leftovers.append(replace(found, whole=whole))
                if not whole:
                    self._unfinished.add(found.key, files.kept(name))
        return leftovers

    def _make_place(self, key: SpoolKey, paths: PartPaths, size: int, *, spare: bool = False) -> None:
        """Make room for an upload, and its folder. spare: what nothing of is kept gets a spare file."""
        self._remove_excess(key, size)
        # One thread at a time: a thread that finds the folder may seal an update in it, and the folder's name must be
        # durable by then.
        with self._making, disk_errors(f"open {paths.part}"):
            make_folders(paths.part.parent, durable=self._durable)
            if spare and not paths.notes.exists() and not paths.final.exists():
                self._spares.take(size, paths.part)
        self._remove_loose(key, but=self._files.name(paths.final) if self._files else "")

    def _opened(self, paths: PartPaths, digest: bytes, size: int) -> PartFile:
        """A part file. The spare files are removed if the disk is full."""
        try:
            return PartFile(paths, digest, size, self._shared)
        except StoreFull:
            if not self.make_room():
                raise
            return PartFile(paths, digest, size, self._shared)

    def _leftover(self, path: Path) -> Leftover | None:
        """The update in a file of the spool; None for other files and for notes."""
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

    def _remove_excess(self, key: SpoolKey, size: int) -> None:
        """Remove the client's oldest unfinished uploads over the limit. Raises TooManyUnfinished."""
        with self._lock:
            self._unfinished.drop([other for other in self._unfinished.of(key.client_id) if self._is_over(other)])
            for other in self._unfinished.excess(key, size, self._unfinished_limit):
                if self._unfinished.excess(key, size, self._unfinished_limit) and not self._is_open(other):
                    self._remove_part(other)
                    self._unfinished.drop([other])
            if self._unfinished.excess(key, size, self._unfinished_limit):
                raise TooManyUnfinished(f"{key.client_id} has too many uploads open already")
            self._unfinished.add(key, size)

    def _is_open(self, key: SpoolKey) -> bool:
        """Whether the upload has a writer. The caller holds the lock."""
        part = self._parts.get(key)
        return key in self._parts and (part is None or not part.closed)

    def _is_over(self, key: SpoolKey) -> bool:
        """Whether an upload was sealed or discarded. The caller holds the lock."""
        return not self._is_open(key) and not self._part_of(key).part.exists()

    def _remove_part(self, key: SpoolKey) -> None:
        with disk_errors(f"remove the upload {key}"):
            self._part_of(key).remove_part()
        self._remove_loose(key)

    def _remove_loose(self, key: SpoolKey, but: str = "") -> None:
        """Remove what the object store has of the client's unfinished uploads of this key; `but`: of another name."""
        if self._files is None:
            return
        for name in self._files.unfinished(self._files.name(self._part_of(key).part.parent)):
            final = _FINAL.fullmatch(name.rpartition("/")[2])
            if final is not None and final["client"] == key.client_id and name != but:
                self._files.remove_file(name)

    def _part_of(self, key: SpoolKey) -> PartPaths:
        return self._paths(key, b"\0")  # the digest is no part of an unfinished upload's name

    def _reserve(self, key: SpoolKey) -> None:
        with self._lock:
            self._parts = {open_key: part for open_key, part in self._parts.items() if part is None or not part.closed}
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
