"""Files that appear whole or not at all, locks on files, and permissions for their owner only.

A state directory holds models, updates and the ledger. A private key that other users can read proves no identity.
Functions that write raise OSError; callers translate it into errors of their own.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fl_common.settings import SettingsError


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


UMASK = 0o077
_NOT_OWNER = stat.S_IRWXG | stat.S_IRWXO


def set_private_umask() -> None:
    """Make all later files of this process private to its user: folders 0700, files 0600."""
    os.umask(UMASK)


def restrict_permissions(folder: Path, names: Sequence[str] | None = None) -> list[Path]:
    """Remove the rights of group and others from a folder and all below it. Returns the paths others can still write.

    names: change only these entries of the folder and all below them, and the folder itself only if it has no others.
    Links are not followed. Files of another user stay unchanged, such as the folder of a volume whose group and mode
    Kubernetes sets (fsGroup). A file that disappears during the call is no error.
    """
    paths = sorted(folder.iterdir())
    ours = paths if names is None else [path for path in paths if path.name in names]
    whole = [folder] if len(ours) == len(paths) else []
    folders = [path for path in ours if path.is_dir() and not path.is_symlink()]
    below = (path for inner in folders for path in _below(inner))
    return [path for path in (*whole, *ours, *below) if not _restricted(path)]


def check_private_key(path: Path, setting: str) -> None:
    """Raises SettingsError for a private key that others can read or change. The message names the remedy."""
    check_secret(path, setting, "private key")


def check_secret(path: Path, setting: str, kind: str) -> None:
    """Raises SettingsError for a file with a secret that others can read or change. kind: "private key", "token".

    A file that belongs to another user may be readable by a group of this process. Kubernetes mounts a Secret that way
    in a pod with an fsGroup (defaultMode 0440, owner root).
    """
    try:
        status = path.stat()
    except OSError:
        return  # reading the file reports the error
    if not stat.S_ISREG(status.st_mode):
        return
    beyond_owner = status.st_mode & _NOT_OWNER
    ours = status.st_uid == os.geteuid() != 0
    group = stat.S_IRGRP if not ours and status.st_gid in {os.getegid(), *os.getgroups()} else 0
    if beyond_owner & ~group:
        raise SettingsError(
            f"{setting}: expected a {kind} that only its owner can read, got {path} with mode "
            f"{stat.S_IMODE(status.st_mode):04o}: chmod 600 {path} (a Secret of Kubernetes: defaultMode 0440 with an "
            "fsGroup); if others could read it, issue a new one"
        )


def _below(folder: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(where, name)


def _restricted(path: Path) -> bool:
    """Whether nobody else can change the file."""
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode) or not status.st_mode & _NOT_OWNER:
            return True
        if status.st_uid != os.geteuid():
            return not status.st_mode & stat.S_IWOTH
        path.chmod(stat.S_IMODE(status.st_mode) & ~_NOT_OWNER)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
