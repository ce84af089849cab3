"""Which local copies of an object store's files are here, and which go when there is no room."""

from __future__ import annotations

import shutil
import threading
from collections import OrderedDict
from pathlib import Path


class LocalCache:
    """Files and folders that may be removed, because the object store has them: the least recently used goes first.

    Thread-safe.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Path, int] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Bytes of all copies."""
        return self._bytes

    def add(self, path: Path, size: int) -> None:
        """A new copy. Older ones are removed to make room for it; the newest one stays, however large it is."""
        with self._lock:
            self._drop(path)
            self._sizes[path] = size
            self._bytes += size
            while self._bytes > self._most and len(self._sizes) > 1:
                oldest = next(iter(self._sizes))
                self._drop(oldest)
                _remove(oldest)

    def used(self, path: Path) -> None:
        """A copy was read."""
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)

    def forget(self, path: Path) -> None:
        """A copy, or all copies in a folder, are removed by others or must stay."""
        with self._lock:
            for known in [known for known in self._sizes if known == path or path in known.parents]:
                self._drop(known)

    def empty(self, folder: Path) -> None:
        """Remove a folder of copies, of an earlier process."""
        self.forget(folder)
        _remove(folder)

    def _drop(self, path: Path) -> None:
        self._bytes -= self._sizes.pop(path, 0)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
