"""Files that nobody needs any more, kept to be written over: their pages are there, and a new file's have to be found.

Writing an update of 45 MB over one of the round before takes the kernel a fraction of the time that a new file of that
size takes it, and renaming that one is much less than removing it. What stood in a file is never read: an upload's
notes alone say which of its bytes came.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from pathlib import Path

from fl_server.store.files import make_folders

MOST_BYTES = 4 << 30
"""Kept at most, however large a cohort was; an operator may wonder where the room is."""


class SpareFiles:
    """A folder of spare files. Thread-safe; raises OSError."""

    def __init__(self, folder: Path) -> None:
        """What an earlier process left there is removed."""
        self._folder = folder
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._spares: dict[int, list[Path]] = {}
        if folder.exists():
            shutil.rmtree(folder)

    def give(self, paths: list[Path]) -> None:
        """Take files over that nobody has open. Those of the same size that were not used since the last time go."""
        by_size: dict[int, list[Path]] = {}
        for path in paths:
            by_size.setdefault(path.stat().st_size, []).append(path)
        with self._lock:
            for size, given in by_size.items():
                self._remove(self._spares.pop(size, []))
                room = (MOST_BYTES - self._bytes()) // max(size, 1)
                self._spares[size] = [self._renamed(path) for path in given[: max(room, 0)]]

    def take(self, size: int, path: Path) -> bool:
        """Put a spare of exactly this size at the path, in place of what is there; False, and nothing done, without."""
        with self._lock:
            if not (spares := self._spares.get(size)):
                return False
            spares.pop().replace(path)
            return True

    def clear(self) -> bool:
        """Remove them all, for the room that they take; False if there were none."""
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
