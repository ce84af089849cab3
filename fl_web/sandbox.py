"""Takes from this process the access to files that it does not need, where the kernel can (Landlock, Linux 5.13).

The web process answers strangers, as the same user as the coordinator. So without this it could read the keys of the
coordinator and its state. With it, it reads its own code and libraries, writes nothing, opens no TCP connection of its
own, and traces no process outside. Sockets that are open stay open.
"""

from __future__ import annotations

import mimetypes
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from fl_common import landlock

_SYSTEM = (
    "/usr", "/lib", "/lib64", "/etc/localtime", "/dev/null", "/dev/urandom", *mimetypes.knownfiles,
    "/etc/ssl/openssl.cnf", "/etc/pki/tls/openssl.cnf", "/etc/crypto-policies",
)  # fmt: skip
_IMPORTED = landlock.READ_FILE | landlock.READ_DIR
_PACKAGES = ("fl_web", "fl_common", "protos")


def restrict(allowed: Mapping[Path, int]) -> str:
    """Leave this process, with all threads that it starts, only these rights below these paths.

    Returns why the kernel cannot; empty if it is done.
    """
    try:
        network = landlock.TCP if landlock.version() >= 4 else 0
    except OSError as error:
        return str(error)
    grants = ((path.resolve(), rights) for path, rights in allowed.items())
    landlock.restrict(landlock.FIRST, grants, network=network)
    return ""


def code_of_this_process() -> dict[Path, int]:
    """The folders of Python, of installed packages and of our own packages, with the rights that imports need."""
    allowed: dict[Path, int] = {}
    for path in {*_SYSTEM, sys.prefix, sys.base_prefix, *_installed()}:
        allowed[Path(path)] = _IMPORTED | landlock.EXECUTE
    for folder in map(Path, sys.path):
        if folder not in allowed and Path(sys.base_prefix) not in folder.parents:  # it may have anything in it
            allowed[folder] = landlock.READ_DIR
            allowed |= {folder / name: _IMPORTED for name in _PACKAGES}
    return allowed


def _installed() -> Iterable[str]:
    return (path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"})
