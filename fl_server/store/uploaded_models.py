"""Models that operators have sent and that a run may start from, until the run is created; and the bytes of releases.

    OWNER/HEX.safetensors     OWNER: digest of the operator's name; HEX: BLAKE3 of the file
    OWNER/HEX.bundle          the files of a release, until it is created

A file is written under a temporary name, checked and renamed. It is kept for an hour; an operator has two at most.

    releases/HEX.bundle       HEX: BLAKE3 of the file; in the object store, too, if there is one
    packages/HEX.bundle       the same of packages of task code

A file is moved there before the ledger has its release, so a release always has its bytes. A file that no release
needs is removed at a start.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Collection
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from fl_common.files import fsync_path, make_folders
from fl_common.settings import parse_json
from fl_server.store.errors import StoreError, disk_errors, file_digest
from fl_server.store.objects.files import StoredFiles

MOST, KEPT_S = 2, 3600.0
"""Files of one operator, and seconds for which each is kept."""
BUNDLE = ".bundle"
"""Suffix of the files of a release."""
_PART = ".part-"
_LONGEST_HEADER = 64 << 20
"""Bytes; a header of a thousand tensors has about 100,000."""
RELEASES, PACKAGES = "releases", "packages"
"""Folders in the state directory."""


class WrongBytes(ValueError):
    """The bytes are not those of the description."""


class UploadedModels:
    """The files of all operators in one folder. Blocking; raises StoreError and StoreFull."""

    def __init__(self, folder: Path) -> None:
        """Empty the folder of what a killed process has left."""
        self._folder = folder
        with disk_errors(f"open the uploaded models in {folder}"):
            make_folders(folder, durable=False)
            for owner in folder.iterdir():
                for part in owner.glob(f"{_PART}*"):
                    part.unlink()
                _expire(owner)

    def begin(self, owner: str, digest: bytes, size: int, *, release: bool = False) -> Upload:
        """A new file of an operator. size: of the whole file, in bytes. release: it has the files of a release."""
        folder = self._of(owner)
        with disk_errors(f"write an uploaded model in {folder}"):
            make_folders(folder, durable=False)
            _expire(folder, most=MOST - 1, but=_name(digest, release=release))
            number, part = tempfile.mkstemp(prefix=_PART, dir=folder)
            file = os.fdopen(number, "wb")
            try:
                os.posix_fallocate(number, 0, size)
            except OSError:
                file.close()
                Path(part).unlink()
                raise
        return Upload(file, Path(part), folder / _name(digest, release=release), digest)

    def path(self, owner: str, digest: bytes, *, release: bool = False) -> Path:
        """The path of an operator's file, which may not exist. Raises ValueError for a digest that is not 32 bytes."""
        return self._of(owner) / _name(digest, release=release)

    def _of(self, owner: str) -> Path:
        return self._folder / hashlib.sha256(owner.encode()).hexdigest()[:32]


class Upload:
    """One file that is being written."""

    def __init__(self, file: BinaryIO, part: Path, target: Path, digest: bytes) -> None:
        self._file, self._part, self._target, self._digest = file, part, target, digest
        self._hasher = blake3()

    def append(self, data: bytes) -> None:
        """Write the next bytes."""
        self._hasher.update(data)
        with disk_errors(f"write {self._part}"):
            self._file.write(data)

    def finish(self) -> None:
        """Put the file in its place. Raises WrongBytes for another digest, and for a file of another format."""
        if (got := self._hasher.digest()) != self._digest:
            raise WrongBytes(f"expected the digest {self._digest.hex()}, got {got.hex()}: send the file again")
        with disk_errors(f"write {self._part}"):
            self._file.flush()
            with self._part.open("rb") as written:
                if self._target.suffix != BUNDLE and not is_safetensors(written):
                    raise WrongBytes("expected a safetensors file, got another kind of file")
            self._file.close()
            self._part.replace(self._target)

    def close(self) -> None:
        """Remove what was not finished."""
        self._file.close()
        self._part.unlink(missing_ok=True)


def is_safetensors(file: BinaryIO | FileIO) -> bool:
    """Whether an open file begins as a safetensors file does. Its position is 0 afterwards. Raises OSError."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    text = file.read(length) if length <= min(_LONGEST_HEADER, os.fstat(file.fileno()).st_size) else b""
    file.seek(0)
    try:
        return isinstance(parse_json(text or b""), dict)
    except ValueError:
        return False


def _name(digest: bytes, *, release: bool) -> str:
    if len(digest) != 32:
        raise ValueError(f"expected a digest of 32 bytes, got {len(digest)}")
    return f"{digest.hex()}{BUNDLE if release else '.safetensors'}"


def _expire(folder: Path, most: int = MOST, but: str = "") -> None:
    """Remove files that are too old, and the oldest of those that are too many."""
    whole = (file for file in folder.iterdir() if not file.name.startswith(_PART))
    files = sorted(whole, key=lambda file: file.stat().st_mtime, reverse=True)
    others = [file for file in files if file.name != but]
    for place, file in enumerate(others):
        if place >= most or time.time() - file.stat().st_mtime > KEPT_S:
            file.unlink()


class ReleaseFiles:
    """The files of all releases of a kind. Blocking; raises StoreError, StoreFull and StoreUnavailable."""

    def __init__(self, state_dir: Path, files: StoredFiles | None, folder: str = RELEASES) -> None:
        """files: the object store; None: the folder is all there is."""
        self._folder, self._stored = state_dir / folder, files

    def keep(self, upload: Path, digest: bytes) -> bool:
        """Keep an uploaded file, durably. Returns False if it is neither there nor here already."""
        path = self._path(digest)
        with disk_errors(f"keep the release {path.name}"):
            if upload.is_file():
                make_folders(self._folder, durable=True)
                fsync_path(upload)
                upload.replace(path)
                fsync_path(self._folder)
            elif not path.is_file():
                return False
        if self._stored is not None and self._stored.find(self._stored.name(path)) is None:
            self._stored.put_files([path])
        return True

    def opened(self, digest: bytes) -> mmap.mmap:
        """The bytes, mapped from the file, which comes from the object store if it is not here. Raises StoreError."""
        path = self._path(digest)
        stored = None if self._stored is None else self._stored.find(self._stored.name(path))
        if not path.exists() and self._stored is not None and stored is not None:
            self._stored.fetch(stored, path)
        with disk_errors(f"read the release {path.name}"):
            if file_digest(path) != digest:
                raise StoreError(f"{path} has other bytes than were released: restore it from a backup")
            with path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def keep_only(self, digests: Collection[bytes]) -> None:
        """Remove all other files. A download that reads one goes on."""
        wanted = {self._path(digest) for digest in digests}
        with disk_errors(f"clear {self._folder}"):
            here = set(self._folder.iterdir()) if self._folder.is_dir() else set()
            for path in here - wanted:
                path.unlink() if path.is_file() else shutil.rmtree(path)
        if self._stored is not None:
            for name in self._stored.names(self._folder.name):
                if self._folder.parent / name not in wanted:
                    self._stored.remove_file(name)

    def _path(self, digest: bytes) -> Path:
        return self._folder / f"{digest.hex()}{BUNDLE}"
