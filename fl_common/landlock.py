"""Landlock: a thread takes from itself, and from all threads that it starts, the access to files and to the network.

Landlock knows grants only: what no rule grants is refused. Linux has it from 5.13 on.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_CREATE, _ADD, _RESTRICT = 444, 445, 446
"""System calls, the same on every machine."""
_ASK_VERSION, _PATH_BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
FIRST, REFER, TRUNCATE = (1 << 13) - 1, 1 << 13, 1 << 14
"""All rights of the first version, and those that the second and the third have added."""
TCP = 3
"""The rights to bind and to connect TCP sockets, of version 4."""
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE


def version() -> int:
    """The version that the kernel has. Raises OSError if it has none."""
    if sys.platform != "linux":
        raise OSError(f"{sys.platform} has none")
    known = int(_libc().syscall(_CREATE, None, ctypes.c_size_t(0), _ASK_VERSION))
    if known < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return known


def restrict(handled: int, grants: Iterable[tuple[Path, int]], *, network: int = 0) -> None:
    """Leave this thread, and all that it starts, only what is granted. What is open stays open.

    Args:
        handled: the rights to files that are refused without a grant.
        grants: paths without links, with the rights to each and to all below it. A path that is not there counts not.
        network: the rights to sockets that are refused.

    Raises:
        OSError: the kernel refuses it.
    """
    sizes = ctypes.c_size_t(16 if network else 8)  # older versions know the first number only
    rules = _call(_CREATE, struct.pack("=QQ", handled, network), sizes, 0)
    try:
        for path, rights in grants:
            _grant(rules, path, rights)
        _libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _call(_RESTRICT, rules, 0)
    finally:
        os.close(rules)


def _grant(rules: int, path: Path, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # gone, or not for this user anyway
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
