"""The bytes of released models: one file for each release, by its digest, and in the object store if there is one.

    releases/HEX.bundle     HEX: BLAKE3-256 of the file

A file is moved here before the ledger has its release, so a release always has its bytes. A file that no release
needs is removed at a start.
"""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Collection
from pathlib import Path

from fl_common.files import fsync_path, make_folders
from fl_server.store.errors import StoreError
from fl_server.store.files import disk_errors, file_digest
from fl_server.store.objects.files import StoredFiles
from fl_server.store.uploaded_models import BUNDLE

FOLDER = "releases"
"""The folder in the state directory."""


class ReleaseFiles:
    """The files of all releases. Blocking; raises StoreError, StoreFull and StoreUnavailable."""

    def __init__(self, state_dir: Path, files: StoredFiles | None) -> None:
        """files: the object store; None: the folder is all there is."""
        self._folder, self._stored = state_dir / FOLDER, files

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
            for name in self._stored.names(FOLDER):
                if self._folder.parent / name not in wanted:
                    self._stored.remove_file(name)

    def _path(self, digest: bytes) -> Path:
        return self._folder / f"{digest.hex()}{BUNDLE}"
