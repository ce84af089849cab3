"""The errors of the store: ledger, checkpoints, spool, state directory. What a disk's errors mean, and file names."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Literal

from blake3 import blake3

Durability = Literal["process", "power"]
"""Whether an acknowledged write survives SIGKILL of the coordinator only, or a power cut too."""
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM})
"""The disk is full or writing is not permitted. An operator can fix both, and the coordinator then continues."""
NO_FILES_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE})
"""This process or this machine cannot open another file. The error passes when other files are closed."""
_BLOCK_BYTES = 1 << 20
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class StoreError(Exception):
    """The store could not do what was asked; nothing was changed."""


class StoreFull(StoreError):
    """The disk is full, or writing is not permitted. Everything stored before stays valid."""


class NoOpenFiles(StoreFull):
    """This process or this machine cannot open another file. The error passes when other files are closed."""


class NoCheckpoint(StoreError):
    """A round has no checkpoint: it was removed, or never written."""


class StoreUnavailable(StoreFull):
    """The database cannot be reached, or another coordinator owns it. As with a full disk, a retry may succeed.

    A connection that is lost while a transaction ends leaves the result unknown: writing the same again is right.
    """


class LedgerHeld(StoreUnavailable):
    """Another coordinator has the lease of the ledger."""


class StoreTakenOver(StoreError):
    """Another coordinator opened the ledger later. The state of this coordinator is stale, and it must end."""


def check_id(value: str, what: str) -> str:
    """The id itself if it can be part of a file name; StoreError otherwise. `what` names it in the error."""
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


def file_digest(path: Path) -> bytes:
    """BLAKE3-256 of a file. Raises StoreError."""
    with disk_errors(f"read {path}"), path.open("rb", buffering=0) as file:
        return open_file_digest(file)


def open_file_digest(file: FileIO) -> bytes:
    """BLAKE3-256 of an open file from its current position, read in blocks. Raises StoreError."""
    hasher = blake3()
    block = memoryview(bytearray(_BLOCK_BYTES))
    with disk_errors(f"read {file.name}"):
        while count := file.readinto(block):
            hasher.update(block[:count])
    return hasher.digest()


def remove_folder(folder: Path, doing: str) -> None:
    """Remove a folder and its contents; a missing folder is no error."""
    with disk_errors(doing):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            return
