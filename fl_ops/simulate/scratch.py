"""Scratch folders of a simulation: in memory if their files are small, otherwise on disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

_MEMORY_DISK = Path("/dev/shm")  # noqa: S108 - only folders of a random name are made in it
_UPDATE_BYTES = 64 << 20
"""Updates of a round are in memory up to this size."""
_STATE_SHARE = 0.25
"""Client states are in memory up to this share of what is free there when the run begins."""


def folder_of_updates(size: int) -> TemporaryDirectory[str]:
    """A folder for a round's updates of this many bytes together."""
    return _folder("fl-updates-", in_memory=size <= _UPDATE_BYTES)


def folder_of_states(size: int) -> TemporaryDirectory[str]:
    """A folder for client states of at most this many bytes together."""
    free = shutil.disk_usage(_MEMORY_DISK).free if _MEMORY_DISK.is_dir() else 0
    return _folder("fl-states-", in_memory=size <= _STATE_SHARE * free)


def _folder(prefix: str, *, in_memory: bool) -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix=prefix, dir=_MEMORY_DISK if in_memory and _MEMORY_DISK.is_dir() else None)
