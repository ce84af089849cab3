"""Files of earlier rounds, kept to be overwritten: a new file needs new pages, and these files have theirs.

Writing 45 MB over an existing file takes the kernel a fraction of the time that a new file takes, and renaming a file
is faster than removing it. The old content is never read: only the notes of an upload say which bytes arrived.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from pathlib import Path

from fl_common.atomic_files import make_folders

MOST_BYTES = 4 << 30
"""Largest total size, for any cohort: operators must not lose their disk space to spare files."""


class SpareFiles:
    """A folder of spare files. Thread-safe; raises OSError."""

    def __init__(self, folder: Path) -> None:
        """Remove the files of an earlier process."""
        self._folder = folder
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._spares: dict[int, list[Path]] = {}
        if folder.exists():
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
            found = [path for spares in self._spares.values() for path in spares]
            self._spares.clear()
            self._remove(found)
            return bool(found)

    def _renamed(self, path: Path) -> Path:
        make_folders(self._folder, durable=False)
        spare = self._folder / str(next(self._numbers))
        return path.replace(spare)

    def _bytes(self) -> int:
        return sum(size * len(spares) for size, spares in self._spares.items())

    def _remove(self, paths: list[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
