"""Scratch folders of a simulation: in memory if their files are small, otherwise on disk.

A folder is removed when its simulation ends, also after an error or Ctrl-C. A process that was killed leaves its folders;
the next simulation of the same user removes them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from fl_common.file_lock import FileLock, FileLocked

MEMORY_DISK = Path("/dev/shm")  # noqa: S108 - only folders of a random name are made in it
_UPDATE_BYTES = 64 << 20
"""Updates of a round are in memory up to this size."""
STATE_SHARE = 0.25
"""Client states are in memory up to this share of what is free there when the run begins."""
_PREFIX = "fl-simulate-"
_LOCK = ".in-use"
_NEW_S = 60.0
"""Folders younger than this are left alone: their process may not have locked them yet."""


class ScratchFolder:
    """A folder until `cleanup`; a context manager. Its process holds a lock in it."""

    def __init__(self, kind: str, *, in_memory: bool) -> None:
        parent = MEMORY_DISK if in_memory and MEMORY_DISK.is_dir() else Path(tempfile.gettempdir())
        _remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-", dir=parent))
        self._lock = FileLock(self.path / _LOCK, str(os.getpid()))

    def cleanup(self) -> None:
        """Remove the folder with all files. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cleanup()


def folder_of_updates(size: int) -> ScratchFolder:
    """A folder for a round's updates of this many bytes together."""
    return ScratchFolder("updates", in_memory=size <= _UPDATE_BYTES)


def folder_of_states(size: int) -> ScratchFolder:
    """A folder for client states of at most this many bytes together."""
    free = shutil.disk_usage(MEMORY_DISK).free if MEMORY_DISK.is_dir() else 0
    return ScratchFolder("states", in_memory=size <= STATE_SHARE * free)


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that were killed: nobody holds their locks."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_uid != os.getuid() or time.time() - folder.stat().st_mtime < _NEW_S:
                continue
            lock = FileLock(folder / _LOCK, "")
        except (FileLocked, OSError):
            continue
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()
