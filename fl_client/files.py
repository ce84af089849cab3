"""Files that are whole or not there: written beside and renamed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from protos.chunks import Buffer

PART = ".part"
"""How the name of a file ends that is being written."""


def write_whole(path: Path, buffers: Iterable[Buffer], *, durable: bool = False, over: Path | None = None) -> None:
    """Put the buffers, one behind the other, in place of what is at the path; survives the death of the process.

    durable: survives a power cut too. over: a file that nobody needs, and that may not be there; what stands in it is
    written over, which takes the kernel a fraction of the time that a new file does. Raises OSError when the disk does
    not take it; the old file then stays.
    """
    part = path.with_suffix(PART)
    try:
        if over is not None:
            with suppress(FileNotFoundError):
                over.replace(part)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
            file.writelines(buffers)
            file.truncate()
            if durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
    if durable:
        _sync_names(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder that is not there, and what is missing above it; the names survive a power cut."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        _sync_names(each.parent)
    if not missing:  # a process may have been killed when it had just made it
        with suppress(PermissionError):
            _sync_names(folder.parent)


def made(folder: Path) -> Path:
    """A folder of the state directory, made when it is not there, without what a killed process left half written.

    The names in it survive a power cut from now on: that process may have been killed before it had seen to it.
    """
    make_folder(folder)
    for torn in folder.glob(f"*{PART}"):
        torn.unlink()
    _sync_names(folder)
    return folder


def _sync_names(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
