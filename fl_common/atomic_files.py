"""Files that appear whole or not at all: written under a temporary name, synced, renamed.

All functions raise OSError; callers translate it into errors of their own.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_writer(
    path: Path, *, part: Path | None = None, replace: bool = True, durable: bool = True
) -> Iterator[BinaryIO]:
    """A file to write to. It appears at `path` when the block ends without an error, and otherwise not at all.

    Args:
        path: of the finished file.
        part: the temporary name, in the same folder. A file that already has this name is written over, which is
            faster than a new file. None: a unique name, so that several processes can write at once; the file's mode
            is then 0600.
        replace: whether an existing file is replaced; otherwise it raises FileExistsError.
        durable: whether the file survives a power cut. It survives the end of the process in any case.
    """
    descriptor, temporary = _open_part(path, part)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.truncate()
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if replace:
            temporary.replace(path)
        else:
            os.link(temporary, path)  # unlike a rename, a link fails when another process made the file meanwhile
            temporary.unlink()
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Force a file's bytes, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(folder: Path, *, durable: bool) -> None:
    """Make a folder and its missing parents. durable: each new name is synced in its parent folder."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    for made in reversed(missing):
        made.mkdir(exist_ok=True)
        if durable:
            fsync_path(made.parent)


def _open_part(path: Path, part: Path | None) -> tuple[int, Path]:
    if part is not None:
        return os.open(part, os.O_WRONLY | os.O_CREAT, 0o666), part
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    return descriptor, Path(name)
