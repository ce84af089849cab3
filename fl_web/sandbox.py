"""Takes from this process the access to files that it does not need, where the kernel can (Landlock, Linux 5.13).

The web process answers strangers, as the same user as the coordinator. So without this it could read the keys of the
coordinator and its state. With it, it reads its own code and libraries, writes nothing, opens no TCP connection of its
own, and traces no process outside. Sockets that are open stay open.
"""

from __future__ import annotations

import ctypes
import mimetypes
import os
import struct
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446
"""System calls, which have these numbers on all architectures."""
_VERSION, _BENEATH = 1, 1
_NO_NEW_PRIVILEGES = 38
_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
_ALL_OF_FILES = (1 << 13) - 1
"""Rights of the first version: these four, and to remove and make entries."""
_ALL_OF_NETWORK = 3
"""The rights to bind and to connect TCP sockets, of version 4."""
_SYSTEM = (
    "/usr", "/lib", "/lib64", "/etc/localtime", "/dev/null", "/dev/urandom", *mimetypes.knownfiles,
    "/etc/ssl/openssl.cnf", "/etc/pki/tls/openssl.cnf", "/etc/crypto-policies",
)  # fmt: skip
_PACKAGES = ("fl_web", "fl_common", "protos")


class _Kernel:
    """The three system calls. Each raises OSError."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)

    def call(self, *arguments: object) -> int:
        """A system call, by its number."""
        result = int(self._library.syscall(*arguments))
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    def version(self) -> int:
        """The version of Landlock that the kernel has."""
        return self.call(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))

    def forbid_new_privileges(self) -> None:
        """Needed before a process may restrict itself."""
        if self._library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def restrict(allowed: Mapping[Path, int]) -> str:
    """Leave this process, with all threads that it starts, only these rights below these paths.

    Returns why the kernel cannot; empty if it is done.
    """
    if sys.platform != "linux":
        return f"{sys.platform} has none"
    try:
        kernel = _Kernel()
        rules = struct.pack("QQ", _ALL_OF_FILES, _ALL_OF_NETWORK if kernel.version() >= 4 else 0)
        size = 16 if kernel.version() >= 4 else 8
        ruleset = kernel.call(_CREATE, rules, ctypes.c_size_t(size), ctypes.c_uint32(0))
    except (OSError, AttributeError) as error:
        return str(error)
    try:
        for path, rights in allowed.items():
            _allow(kernel, ruleset, path, rights)
        kernel.forbid_new_privileges()
        kernel.call(_RESTRICT, ruleset, ctypes.c_uint32(0))
    finally:
        os.close(ruleset)
    return ""


def code_of_this_process() -> dict[Path, int]:
    """The folders of Python, of installed packages and of our own packages, with the rights that imports need."""
    allowed: dict[Path, int] = {}
    for path in {*_SYSTEM, sys.prefix, sys.base_prefix, *_installed()}:
        allowed[Path(path)] = _READ | _LIST | _EXECUTE
    for folder in map(Path, sys.path):
        if folder not in allowed and Path(sys.base_prefix) not in folder.parents:  # it may have anything in it
            allowed[folder] = _LIST
            allowed |= {folder / name: _READ | _LIST for name in _PACKAGES}
    return allowed


def _installed() -> Iterable[str]:
    return (path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"})


def _allow(kernel: _Kernel, ruleset: int, path: Path, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # there is none here
        return
    try:
        if not path.is_dir():
            rights &= ~_LIST
        kernel.call(_ADD, ruleset, ctypes.c_int(_BENEATH), struct.pack("=Qi", rights, opened), ctypes.c_uint32(0))
    finally:
        os.close(opened)
