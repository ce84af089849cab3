"""One coordinator a state directory: a lock that goes with the process, and a marker that says whose it is."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import uuid
import weakref
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fl_server.store.base import StoreError
from fl_server.store.files import disk_errors, fsync_path, make_folders, sync_names, write_durably
from fl_server.store.ownership import Home

LOCK = "lock"
MARKER = "impetus-state.json"
_MARKER_PART = MARKER + ".part"
_MARKER_CONTENT = {"program": "impetus-coordinator", "format": 1}
_HARMLESS = frozenset({LOCK, _MARKER_PART, "lost+found"})
"""Names that a new directory may hold: leftovers of a start cut short, and what a fresh volume brings."""


class StateDirectoryError(StoreError):
    """The directory cannot be this coordinator's state directory; the message says why and what to do."""


class DirectoryLocked(StateDirectoryError):
    """Another coordinator runs on the directory."""


class DirectoryLock:
    """The right to a state directory, until `release` or the end of the process, however it ends."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        _held.add(self)

    @property
    def home(self) -> Home:
        """The directory's id and its ledger's, as its marker has them."""
        found = _read_json(self.path / MARKER)
        return Home(str(found.get("id", "")), str(found.get("ledger", "")))

    def keep_ledger(self, coordinator_id: str) -> None:
        """Write down which ledger the directory belongs to, for good."""
        if self.home.ledger != coordinator_id:
            with disk_errors(f"mark the state directory {self.path}"):
                _mark(self.path, ledger=coordinator_id)

    def release(self) -> None:
        """Give the directory up. A second call does nothing."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.close_copy()

    def close_copy(self) -> None:
        """Close this process's descriptor without unlocking: what a forked child does with its copy."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _close_copies() -> None:
    for lock in list(_held):
        lock.close_copy()


# A lock belongs to all copies of its descriptor: a worker process that outlives a killed coordinator would hold it on.
os.register_at_fork(after_in_child=_close_copies)


def lock_directory(path: Path | str) -> DirectoryLock:
    """Make the state directory if it is missing, check that it is ours, lock it and mark it.

    Raises DirectoryLocked if another process has it, StateDirectoryError if it cannot be written, is not a directory,
    or holds something else.
    """
    folder = Path(path).absolute()
    try:
        make_folders(folder, durable=True)
        _check_ours(folder)
        lock = _lock(folder)
        try:
            if "id" not in _read_json(folder / MARKER):
                _mark(folder, id=uuid.uuid4().hex)
            _sync_names(folder)
        except BaseException:
            lock.release()
            raise
    except (FileExistsError, NotADirectoryError) as error:
        raise StateDirectoryError(
            f"{folder} is not a directory: name a directory for the coordinator's state"
        ) from error
    except OSError as error:
        raise StateDirectoryError(
            f"cannot write in the state directory {folder} ({error.strerror}): make room or give this user the right "
            "to write there, or name another one"
        ) from error
    return lock


def _check_ours(folder: Path) -> None:
    """Raise unless the directory is new or a coordinator's, in a format that is known here. Changes nothing."""
    marker = folder / MARKER
    if not marker.exists():
        if others := sorted(each.name for each in folder.iterdir() if each.name not in _HARMLESS):
            raise StateDirectoryError(
                f"{folder} is no coordinator's state directory: it holds {', '.join(others[:3])} and no {MARKER}; name "
                "an empty or a new directory"
            )
        return
    found = _read_json(marker)
    if found.get("program") != _MARKER_CONTENT["program"]:
        raise StateDirectoryError(
            f"{folder} belongs to {found.get('program', 'something unknown')!r}, as its {MARKER} says; expected "
            f"{_MARKER_CONTENT['program']!r}: name another directory"
        )
    if found.get("format") != _MARKER_CONTENT["format"]:
        raise StateDirectoryError(
            f"{folder} has state format {found.get('format')!r}; this program knows {_MARKER_CONTENT['format']}: start "
            "the version that wrote it, or name another directory"
        )


def _lock(folder: Path) -> DirectoryLock:
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat("T", "seconds"),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
    except BlockingIOError as error:
        os.close(descriptor)
        holder = _read_json(folder / LOCK)
        raise DirectoryLocked(
            f"another coordinator runs on {folder}: process {holder.get('pid', 'unknown')} on host "
            f"{holder.get('host', 'unknown')}, since {holder.get('since', 'unknown')}; stop it first, or give this one "
            "a state directory of its own"
        ) from error
    except BaseException:
        os.close(descriptor)
        raise
    return DirectoryLock(folder, descriptor)


def _mark(folder: Path, **facts: str) -> None:
    """Add to the marker, which is made with it."""
    content = {**_read_json(folder / MARKER), **_MARKER_CONTENT, **facts}
    write_durably(folder / _MARKER_PART, json.dumps(content).encode())
    (folder / _MARKER_PART).replace(folder / MARKER)
    fsync_path(folder)


def _sync_names(folder: Path) -> None:
    """A start that was killed in between may have left names that a power cut would take."""
    sync_names([folder])
    with suppress(PermissionError):  # where it may not be read, it is not for us to make names durable in it
        sync_names([folder.parent])


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a small file; empty if it is none, or not there."""
    try:
        content = json.loads(path.read_text())
    except (ValueError, FileNotFoundError):
        return {}
    return content if isinstance(content, dict) else {}
