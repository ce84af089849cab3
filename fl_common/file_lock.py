"""An exclusive lock on a file. The kernel releases it when the process ends, also after SIGKILL."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path


class FileLocked(Exception):
    """The lock is held already, by this or by another process."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder
        """The text that the holder wrote into the file; may be empty."""


class FileLock:
    """A held lock, until `release` or the end of the process."""

    def __init__(self, path: Path, holder: str) -> None:
        """Make the file if it is missing, lock it, and write `holder` into it. Raises FileLocked and OSError."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, holder.encode(), 0)
        except BlockingIOError as error:
            os.close(descriptor)
            raise FileLocked(path.read_text(encoding="utf-8", errors="replace")) from error
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor
        _held.add(self)

    def is_at(self, path: Path) -> bool:
        """Whether the locked file is still the one with this name, and was not removed or replaced."""
        if self._descriptor is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.close_copy()

    def close_copy(self) -> None:
        """Close this process's descriptor without unlocking, as a forked child must do with its copy."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _close_copies() -> None:
    for lock in list(_held):
        lock.close_copy()


# A lock belongs to all copies of its descriptor: a forked worker that outlives its parent would keep it held.
os.register_at_fork(after_in_child=_close_copies)
