"""One coordinator per state directory: a lock on the directory, and a marker file that names its owner."""

from __future__ import annotations

import json
import os
import socket
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from fl_common.files import FileLock, FileLocked, atomic_writer, fsync_path, make_folders
from fl_common.settings import parse_json
from fl_server.store.database.transactions import Home
from fl_server.store.errors import StoreError, disk_errors

LOCK = "lock"
MARKER = "impetus-state.json"
_MARKER_PART = MARKER + ".part"
_MARKER_CONTENT = {"program": "impetus-coordinator", "format": 1}
_HARMLESS = frozenset({LOCK, _MARKER_PART, "lost+found"})
"""Names that a new directory may contain: leftovers of an interrupted start, and a new volume's own folder."""


class StateDirectoryError(StoreError):
    """The directory cannot be this coordinator's state directory; the message says why and what to do."""


class DirectoryLocked(StateDirectoryError):
    """Another coordinator runs on the directory."""


class DirectoryLock:
    """The right to a state directory, until `release` or the end of the process, in whatever way it ends."""

    def __init__(self, path: Path, lock: FileLock) -> None:
        self.path = path
        self._lock = lock

    @property
    def home(self) -> Home:
        """The ids of the directory and of its ledger, from the marker file."""
        marker = _read_json(self.path / MARKER)
        return Home(marker["id"], marker.get("ledger", ""))

    def keep_ledger(self, coordinator_id: str) -> None:
        """Record the ledger of the directory, permanently."""
        if self.home.ledger != coordinator_id:
            with disk_errors(f"mark the state directory {self.path}"):
                _mark(self.path, ledger=coordinator_id)

    def release(self) -> None:
        """Release the directory. A second call does nothing."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def ledger_of(folder: Path) -> str:
    """The id of the ledger that a state directory belongs to; empty if it is no coordinator's."""
    return str(_read_json(folder / MARKER).get("ledger", ""))


def lock_directory(path: Path | str) -> DirectoryLock:
    """Make the state directory if it is missing, check that it is a coordinator's, lock it and mark it.

    Raises DirectoryLocked if another process has locked it, and StateDirectoryError if it cannot be written, is not a
    directory, or contains other files.
    """
    folder = Path(path).absolute()
    try:
        make_folders(folder, durable=True)
        _check_ours(folder)
        lock = _lock(folder)
        try:
            if not (folder / MARKER).exists():
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
    """Raise unless the directory is new, or a coordinator's in a known format. Changes nothing."""
    marker = folder / MARKER
    if not marker.exists():
        if others := sorted(path.name for path in folder.iterdir() if path.name not in _HARMLESS):
            raise StateDirectoryError(
                f"{folder} is no coordinator's state directory: it holds {', '.join(others[:3])} and no {MARKER}; name "
                "an empty or a new directory"
            )
        return
    content = _read_json(marker)
    if content.get("program") != _MARKER_CONTENT["program"]:
        raise StateDirectoryError(
            f"{folder} belongs to {content.get('program', 'something unknown')!r} according to its {MARKER}; expected "
            f"{_MARKER_CONTENT['program']!r}: name another directory"
        )
    if content.get("format") != _MARKER_CONTENT["format"]:
        raise StateDirectoryError(
            f"{folder} has state format {content.get('format')!r}; this program knows {_MARKER_CONTENT['format']}: "
            "start the version that wrote it, or name another directory"
        )
    if not isinstance(content.get("id"), str):
        raise StateDirectoryError(
            f"expected the directory's id in {marker}, got none: restore the file, or name another directory"
        )


def _lock(folder: Path) -> DirectoryLock:
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat("T", "seconds")}
    try:
        return DirectoryLock(folder, FileLock(folder / LOCK, json.dumps(holder)))
    except FileLocked as error:
        holder = _read_json(folder / LOCK)
        raise DirectoryLocked(
            f"another coordinator runs on {folder}: process {holder.get('pid', 'unknown')} on host "
            f"{holder.get('host', 'unknown')}, since {holder.get('since', 'unknown')}; stop it first, or give this one "
            "a state directory of its own"
        ) from error


def _mark(folder: Path, **facts: str) -> None:
    """Add facts to the marker file, or make it with them."""
    content = {**_read_json(folder / MARKER), **_MARKER_CONTENT, **facts}
    with atomic_writer(folder / MARKER, part=folder / _MARKER_PART) as file:
        file.write(json.dumps(content).encode())


def _sync_names(folder: Path) -> None:
    """Sync names that an interrupted start may have left unsynced: a power cut would remove them."""
    fsync_path(folder)
    with suppress(PermissionError):  # a parent folder that we cannot read is not ours to sync
        fsync_path(folder.parent)


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a small file; empty if the file is missing or holds no object."""
    try:
        content = parse_json(path.read_text())
    except (ValueError, FileNotFoundError):
        return {}
    return content if isinstance(content, dict) else {}
