"""File permissions: state directories and private keys are for their owner only.

A state directory holds models, updates and the ledger. A private key that other users can read proves no identity.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from fl_common.settings import SettingsError

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
