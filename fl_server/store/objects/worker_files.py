"""The object store as a worker sees it: it puts parts of updates, and the coordinator lets them count.

A worker has no ledger. The coordinator tells it which loose parts of an upload may be used, and gets the parts of the
whole update.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from fl_server.store.database.ledger_objects import StoredFile
from fl_server.store.objects.bucket import Bucket
from fl_server.store.objects.files import PART_BYTES, StoredFiles
from fl_server.store.objects.reading import LocalCache, ObjectReader


class WorkerFiles(StoredFiles):
    """The files of a worker's uploads. Blocking and thread-safe. Raises StoreUnavailable while the store fails."""

    def __init__(self, bucket: Bucket, root: str, state_dir: Path, cache: LocalCache) -> None:
        """root: the coordinator's folder of objects. state_dir: the worker's own, or the coordinator's."""
        ObjectReader.__init__(self, bucket, root)
        self.cache, self._state_dir, self.part_bytes = cache, state_dir, PART_BYTES
        self.epoch = 0
        """The coordinator's, a part of the names of objects."""
        # No two writers give an object one name: the removal of the one would remove the other's.
        self._counts = count(secrets.randbits(48))
        self._lock = threading.Lock()
        self._files: dict[str, StoredFile] = {}
        self._loose: dict[str, dict[str, int]] = {}
        self._sealed: dict[str, StoredFile] = {}

    def give(self, name: str, parts: Sequence[str]) -> None:
        """The coordinator lets an upload use these loose parts of its file, and no others."""
        with self._lock:
            self._loose[name] = dict.fromkeys(parts, 0)

    def take(self, name: str) -> StoredFile | None:
        """A sealed file, which is not known here any more."""
        with self._lock:
            self._loose.pop(name, None)
            return self._sealed.pop(name, None)

    def unfinished(self, folder: str) -> list[str]:
        """None: the coordinator removes what is left of other uploads."""
        del folder
        return []

    def count(self, files: Sequence[StoredFile], *, fsynced: bool = False) -> None:
        """Keep the files until the coordinator is told."""
        del fsynced
        with self._lock:
            self._sealed.update({file.name: file for file in files})

    def kept(self, name: str) -> int:
        """0: the coordinator knows."""
        del name
        return 0

    def remove(self, folder: str) -> None:
        """Forget copies. The coordinator removes objects."""
        self.cache.forget(self._state_dir / folder)

    def remove_file(self, name: str) -> None:
        """The same for one file."""
        with self._lock:
            self._loose.pop(name, None)
            self._sealed.pop(name, None)
        self.cache.forget(self._state_dir / name)
