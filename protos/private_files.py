"""Files that are nobody else's: state of both programs, and private keys.

State directories hold models, updates and ledgers, which others on the machine have no business with. A private key
that others can read is no proof of anything any more.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from protos.settings import SettingsError

UMASK = 0o077
_OTHERS = stat.S_IRWXO
_GROUP = stat.S_IRWXG
_FOREIGN = _GROUP | _OTHERS


def keep_files_private() -> None:
    """Whatever this process makes from now on is its user's alone: folders 0700, files 0600."""
    os.umask(UMASK)


def tighten(folder: Path, names: Sequence[str] | None = None) -> list[Path]:
    """Take the rights of others from a folder and all below it. Returns what of it others can change all the same.

    names: of the folder's entries only these, with what is below them; the folder itself only if it has no others.
    Links are not followed. What belongs to another user is left as it is: a volume's own folder, whose group and modes
    Kubernetes sets (fsGroup), is such. Neither is a file that vanishes meanwhile an error.
    """
    found = sorted(folder.iterdir())
    ours = found if names is None else [path for path in found if path.name in names]
    whole = [folder] if len(ours) == len(found) else []
    below = (path for each in ours if each.is_dir() and not each.is_symlink() for path in _below(each))
    return [path for path in (*whole, *ours, *below) if not _tightened(path)]


def check_private_key(path: Path, setting: str) -> None:
    """Raises SettingsError for a private key that others can read or change, with what to do.

    One that belongs to another user, whom we cannot tell to change it, may be read by a group of ours: so does
    Kubernetes hand a Secret to a pod with an fsGroup (defaultMode 0440, owner root).
    """
    try:
        found = path.stat()
    except OSError:
        return  # whoever reads it says so
    if not stat.S_ISREG(found.st_mode):
        return
    foreign = found.st_mode & _FOREIGN
    ours = found.st_uid == os.geteuid() != 0
    group = stat.S_IRGRP if not ours and found.st_gid in {os.getegid(), *os.getgroups()} else 0
    if foreign & ~group:
        raise SettingsError(
            f"{setting}: expected a private key that only its owner can read, got {path} with mode "
            f"{stat.S_IMODE(found.st_mode):04o}: chmod 600 {path} (a Secret of Kubernetes: defaultMode 0440 with an "
            "fsGroup); if others could read it, issue a new one"
        )


def _below(folder: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield Path(where, name)


def _tightened(path: Path) -> bool:
    """Whether others cannot change the file any more."""
    try:
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode) or not found.st_mode & _FOREIGN:
            return True
        if found.st_uid != os.geteuid():
            return not found.st_mode & stat.S_IWOTH
        path.chmod(stat.S_IMODE(found.st_mode) & ~_FOREIGN)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
