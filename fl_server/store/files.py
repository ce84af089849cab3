"""Durable writes to the state directory, and what the disk's errors mean: the one place that knows errno and fsync."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from fl_server.store.base import NoOpenFiles, StoreError, StoreFull

Durability = Literal["process", "power"]
"""What an acknowledged write survives: SIGKILL of the coordinator, or a power cut too."""

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM})
"""No room, or no right to write: an operator can mend it, and the coordinator then goes on."""
NO_FILES_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE})
"""No further file may be open in this process, or on this machine: it passes when others are closed."""

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_id(value: str, what: str) -> str:
    """The id itself, if it can be part of a file's name; StoreError otherwise. `what` names it in the error."""
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise StoreError(f"{what} must be 1 to 64 of the characters A-Z a-z 0-9 . _ -; got {value!r}")
    return value


def run_folder(root: Path, run_id: str) -> Path:
    """The folder of a run below `root`. The prefix keeps run ids such as ".." harmless."""
    return root / f"run-{check_id(run_id, 'a run id')}"


def disk_error(doing: str, number: int | None, cause: object) -> StoreError:
    """The StoreFull or StoreError for a failed write or read: `number` is the errno, if one is known."""
    if number in NO_FILES_ERRNOS:
        return NoOpenFiles(
            f"could not {doing}: {cause}; see who holds connections, or raise LimitNOFILE (systemd) or "
            "`ulimit -n`; what was stored stays valid"
        )
    if number in FULL_ERRNOS:
        return StoreFull(
            f"could not {doing}: {cause}; make room or give the right to write, what was stored stays valid"
        )
    return StoreError(f"could not {doing}: {cause}")


@contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turn an OSError of the body into StoreFull or StoreError, with its cause. `doing` completes "could not ..."."""
    try:
        yield
    except OSError as error:
        raise disk_error(doing, error.errno, error) from error


def fsync_path(path: Path) -> None:
    """Force a file's bytes, or a directory's names, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file whole and fsync it. Its name is durable once its directory is fsynced too."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def make_folders(folder: Path, *, durable: bool) -> None:
    """Make a folder and what is missing above it; with `durable` each new name is fsynced in its parent."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        if durable:
            fsync_path(each.parent)


def sync_names(folders: Iterable[Path]) -> None:
    """Force the names in folders that are here at a start onto the disk.

    A process may have been killed between a rename and its fsync. The next one goes by the name that it finds, and what
    it then says must outlast a power cut.
    """
    for each in folders:
        fsync_path(each)


def remove_folder(folder: Path, doing: str) -> None:
    """Remove a folder with all in it; one that is not there is no error."""
    with disk_errors(doing):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            return
