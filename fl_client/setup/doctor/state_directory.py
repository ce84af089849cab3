"""Checks the state directory: whether it can be written, its identity, and its lock. Nothing is left in it."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from pathlib import Path

from fl_client.errors import ConfigError
from fl_client.settings.config import ClientConfig
from fl_client.settings.identity import identity_of
from fl_client.setup.doctor.findings import Finding, fail, ok, warn
from fl_client.storage.examination import check_writable
from fl_common.settings import parse_json

_LOCKS = Path("/proc/locks")


def check(config: ClientConfig) -> Iterator[Finding]:
    """Check that it can be written, and that it belongs to this device."""
    folder = config.state_dir.absolute()
    place = nearest(folder)
    if (refusal := _refusal(place)) is not None:
        message = f"expected a directory that can be written, got {refusal}"
        fix = f"{USER}, or set another state_dir; is the disk full, or mounted read-only?"
        yield fail("state_dir", message, f"{fix} A running daemon takes no work until then, and needs no restart")
        return
    created = "" if place == folder else f", and will be created in {place}"
    yield _holder(folder) or ok("state_dir", f"{folder} can be written{created}")
    yield from _owner(config, folder)


def nearest(folder: Path) -> Path:
    """The folder, or the nearest folder above it that exists."""
    return next(each for each in (folder, *folder.parents) if _may_exist(each))


def _may_exist(folder: Path) -> bool:
    try:
        return folder.exists()
    except PermissionError:
        return True  # the write test reports the problem


def _refusal(place: Path) -> OSError | None:
    """The error of a durable write, or None."""
    try:
        check_writable(place)
    except OSError as error:
        return error
    return None


def _holder(folder: Path) -> Finding | None:
    """The holder of the lock. A running daemon is no failure.

    The check reads the kernel's list of locks. Taking the lock, even briefly, could prevent a daemon's start.
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
    """Check that the directory belongs to this device and user."""
    try:
        kept = parse_json((folder / "identity.json").read_text(encoding="utf-8")).get("client_id")
        wanted = identity_of(config)
    except FileNotFoundError:
        return
    except ConfigError:
        return  # reported by the check of certificates
    except (OSError, ValueError, AttributeError) as error:
        yield fail("state_dir", f"expected a valid identity.json, got {error}", USER)
        return
    if kept != wanted:
        message = f"expected the directory of client {wanted!r}, got that of {kept!r}"
        yield fail("state_dir", message, "a state directory belongs to one device: set another")
    if folder.stat().st_uid != os.geteuid():
        message = f"expected a directory of the user {getpass.getuser()}, got one of the user id {folder.stat().st_uid}"
        yield warn("state_dir", message, USER)


USER = "run this as the service's user: sudo -u impetus fl-client doctor ..."
