"""Scratch folders of a simulation: in memory if their files are small, otherwise on disk.

A folder is removed when its simulation ends, also after an error or Ctrl-C. A process that was killed leaves its
folders; the next simulation of the same user removes them.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from fl_common.file_lock import FileLock, FileLocked

MEMORY_DISK = Path("/dev/shm")  # noqa: S108 - only folders of a random name are made in it
MEMORY_SHARE = 0.25
"""Files are in memory up to this share of what is free there when the run begins."""
_PREFIX = "fl-scratch-"
_LOCK = ".in-use"
_NEW_S = 60.0
"""Folders younger than this are left alone: their process may not have locked them yet."""


class ScratchFolder:
    """A folder until `cleanup`, or until the end of the process. Its process holds a lock in it."""

    def __init__(self, kind: str, *, in_memory: bool) -> None:
        parent = MEMORY_DISK if in_memory and MEMORY_DISK.is_dir() else Path(gettempdir())
        _remove_abandoned(parent)
        self._folder = TemporaryDirectory(prefix=f"{_PREFIX}{kind}-", dir=parent)
        self.path = Path(self._folder.name)
        self._lock = FileLock(self.path / _LOCK, str(os.getpid()))

    def cleanup(self) -> None:
        """Remove the folder with all files. A second call does nothing."""
        self._folder.cleanup()
        self._lock.release()


def folder_of_updates(size: int) -> ScratchFolder:
    """A folder for a round's updates of this many bytes together."""
    return ScratchFolder("updates", in_memory=_fits(size))


def folder_of_states(size: int) -> ScratchFolder:
    """A folder for client states of at most this many bytes together."""
    return ScratchFolder("states", in_memory=_fits(size))


def free_memory() -> int:
    """Bytes of files that memory has room for; 0 where it holds no files."""
    return shutil.disk_usage(MEMORY_DISK).free if MEMORY_DISK.is_dir() else 0


def folder_of_a_rank() -> ScratchFolder:
    """A folder for a rank's updates and client states."""
    return ScratchFolder("rank", in_memory=False)


def _fits(size: int) -> bool:
    return MEMORY_DISK.is_dir() and size <= MEMORY_SHARE * free_memory()


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that were killed: nobody holds their locks."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            facts = lock.stat()
            if facts.st_uid != os.getuid() or time.time() - facts.st_mtime < _NEW_S:
                continue
            held = FileLock(lock, "")
        except (FileLocked, OSError):
            continue
        shutil.rmtree(lock.parent, ignore_errors=True)
        held.release()
