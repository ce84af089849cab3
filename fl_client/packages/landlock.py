"""Hides files from a process for good, by the kernel's Landlock, and starts the process of a package behind it.

    python -P -m fl_client.packages.landlock FD HIDDEN      HIDDEN: JSON, see `main`

Landlock knows grants only: what no rule grants is refused. So everything is granted beside the way to what is hidden:
each entry of each folder above it, as it is at the start. Those folders themselves cannot be listed, and what is made
in them later is hidden too. Paths are followed to where the file is, so neither links nor /proc lead around it.

It holds for the thread that asks and for the threads that this one starts. So it comes before torch and any other
thread, in which the code of a package could run instead.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import struct
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_CREATE, _ADD, _RESTRICT = 444, 445, 446
"""System calls, the same on every machine."""
_ASK_VERSION, _PATH_BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_FIRST, _REFER, _TRUNCATE = (1 << 13) - 1, 1 << 13, 1 << 14
"""The rights of the first version, and those that the second and the third have added. Calls of devices stay open: a
GPU needs them."""
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_READ = _EXECUTE | _READ_FILE | _READ_DIR


def version() -> int:
    """The version of the kernel's Landlock; 0: it has none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(_libc().syscall(_CREATE, None, ctypes.c_size_t(0), _ASK_VERSION)))


def hide(hidden: Collection[Path], read: Iterable[Path] = (), write: Iterable[Path] = ()) -> bool:
    """Take these files and folders away from this thread and all that it starts. False: the kernel has no Landlock.

    Args:
        hidden: absolute paths without links; they need not exist.
        read: may be read and run, also beneath what is hidden.
        write: the same, for every access.

    Raises:
        OSError: the kernel refuses it.
    """
    known = version()
    if not known:
        return False
    handled = _FIRST | (_REFER if known > 1 else 0) | (_TRUNCATE if known > 2 else 0)
    rules = _call(_CREATE, struct.pack("=Q", handled), ctypes.c_size_t(8), 0)
    try:
        for path in (*_beside(Path("/"), hidden), *write):
            _grant(rules, path, handled)
        for path in read:
            _grant(rules, path, _READ)
        _libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _call(_RESTRICT, rules, 0)
    finally:
        os.close(rules)
    return True


def _beside(folder: Path, hidden: Collection[Path]) -> Iterator[Path]:
    """What is in a folder above hidden paths and leads to none of them. Links need no grant: their targets do."""
    with suppress(PermissionError), os.scandir(folder) as entries:
        for entry in entries:
            path = folder / entry.name
            if entry.is_symlink() or path in hidden:
                continue
            if any(path in one.parents for one in hidden):
                yield from _beside(path, hidden)
            else:
                yield path


def _grant(rules: int, path: Path, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):  # it has gone since, or this user may not use it anyway
        return
    try:
        here = rights if path.is_dir() else rights & _OF_FILES
        _call(_ADD, rules, _PATH_BENEATH, struct.pack("=Qi", here, opened), 0)
    except OSError as error:
        if error.errno != errno.EBADFD:  # a file that is on no disk
            raise
    finally:
        os.close(opened)


def _call(*arguments: Any) -> int:
    if (result := int(_libc().syscall(*arguments))) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock is refused: {os.strerror(number)}")
    return result


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Hide what the daemon says, as {"hidden": [...], "read": [...], "write": [...]}, and serve as its process."""
    paths = {name: [Path(path) for path in listed] for name, listed in json.loads(sys.argv[2]).items()}
    hide(paths["hidden"], paths["read"], paths["write"])
    from fl_client.packages import process  # noqa: PLC0415 - it loads torch, which has threads

    process.serve()


if __name__ == "__main__":
    main()
