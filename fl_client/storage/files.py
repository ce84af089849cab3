"""Files of the state directory: each is written whole or not at all, and its folder keeps no half-written ones."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fl_common.atomic_files import atomic_writer, fsync_path, make_folders
from protos.chunks import Buffer

PART = ".part"
"""Suffix of a file that is being written."""


def write_whole(path: Path, buffers: Iterable[Buffer], *, durable: bool = False, over: Path | None = None) -> None:
    """Write the buffers, one after the other, in place of the file at the path.

    Args:
        path: of the file. If the disk cannot take the new one, the old one stays.
        buffers: the content.
        durable: whether the file survives a power cut; it survives the death of the process in any case.
        over: a file that is no longer needed, and may be missing. Its blocks are overwritten, which takes the kernel a
            fraction of the time that a new file takes.

    Raises:
        OSError: the disk cannot take the file.
    """
    part = path.with_suffix(PART)
    if over is not None:
        with suppress(FileNotFoundError):
            over.replace(part)
    with atomic_writer(path, part=part, durable=durable) as file:
        file.writelines(buffers)


def make_folder(folder: Path) -> None:
    """Make a missing folder and its missing parents; the names survive a power cut."""
    existed = folder.exists()
    make_folders(folder, durable=True)
    if existed:  # an earlier process may have been killed just after it made the folder
        with suppress(PermissionError):
            fsync_path(folder.parent)


def made(folder: Path) -> Path:
    """A folder of the state directory, made if it is missing, without files that a killed process left half-written.

    From now on its names survive a power cut: the killed process may not have synced them.
    """
    make_folder(folder)
    for torn in folder.glob(f"*{PART}"):
        torn.unlink()
    fsync_path(folder)
    return folder
