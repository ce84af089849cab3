"""The state directory, looked at from outside: can it be written, whose is it, who holds it. Nothing is left in it."""

from __future__ import annotations

import getpass
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fl_client.config import ClientConfig
from fl_client.errors import ConfigError
from fl_client.identity import identity_of
from fl_client.setup.findings import Finding, fail, ok, warn

_LOCKS = Path("/proc/locks")
_PROBE = 1 << 16
"""Bytes that are written to see whether the disk takes them."""


def look(config: ClientConfig) -> Iterator[Finding]:
    """Where it is, whether it can be written, and whose it is."""
    folder = config.state_dir.absolute()
    place = nearest(folder)
    if (refusal := _refusal(place)) is not None:
        said = f"expected a directory that can be written, got {refusal}"
        yield fail("state_dir", said, f"{USER}, or name another state_dir; is the disk full, or mounted read-only?")
        return
    made = "" if place == folder else f", to be made in {place}"
    yield _holder(folder) or ok("state_dir", f"{folder} can be written{made}")
    yield from _owner(config, folder)


def nearest(folder: Path) -> Path:
    """The folder itself, or what is there of the folders above it."""
    return next(each for each in (folder, *folder.parents) if _may_be_there(each))


def _may_be_there(folder: Path) -> bool:
    try:
        return folder.exists()
    except PermissionError:
        return True  # what is tried with it says what is wrong


def _refusal(place: Path) -> OSError | None:
    """What the disk says to some bytes, that it is to keep."""
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(_PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


def _holder(folder: Path) -> Finding | None:
    """Who holds the lock; a daemon at work is no fault.

    The kernel's list is read. Trying the lock would take it for a moment, and a daemon that starts just then would end.
    """
    lock = folder / "lock"
    try:
        inode, holder = lock.stat().st_ino, lock.read_text(encoding="utf-8").strip() or "unknown"
        held = any(f":{inode} " in line for line in _LOCKS.read_text(encoding="utf-8").splitlines() if "FLOCK" in line)
    except FileNotFoundError:
        return None
    except OSError as error:
        return fail("state_dir", f"expected a lock that can be read, got {error}", USER)
    return ok("state_dir", f"{folder} is held by process {holder}: a daemon runs") if held else None


def _owner(config: ClientConfig, folder: Path) -> Iterator[Finding]:
    """A directory that is another device's, or another user's."""
    try:
        kept = json.loads((folder / "identity.json").read_text(encoding="utf-8")).get("client_id")
        wanted = identity_of(config)
    except FileNotFoundError:
        return
    except ConfigError:
        return  # said elsewhere
    except (OSError, ValueError, AttributeError) as error:
        yield fail("state_dir", f"expected identity.json as a daemon wrote it, got {error}", USER)
        return
    if kept != wanted:
        said = f"expected the directory of client {wanted!r}, got that of {kept!r}"
        yield fail("state_dir", said, "a state directory is one device's: name another")
    if folder.stat().st_uid != os.geteuid():
        said = f"expected a directory of the user {getpass.getuser()}, got one of the user id {folder.stat().st_uid}"
        yield warn("state_dir", said, USER)


USER = "run this as the user of the service: sudo -u impetus fl-client doctor ..."
