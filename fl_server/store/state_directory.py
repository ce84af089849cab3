"""The state directory: a lock and a marker that names its owner, and the secrets and counts of private runs in it.

One coordinator uses a state directory.

    privacy/RUN_ID.key     32 random bytes: cohorts and noise of the run follow from them
    privacy/charges.json   {account: {"number": charges, "noise_multiplier": the least, "rate": the largest,
                           "fixed_size": whether cohorts have one}}

With an object store both are there too, so that a coordinator on another machine continues private runs: the counts as
objects of their own. The ledger does not refer to them.
A ledger that was restored from a backup has fewer charges than were released. The count outside of it finds that, and
the missing ones are charged again, each as the dearest one of the account.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from fl_common.files import FileLock, FileLocked, atomic_writer, fsync_path, make_folders
from fl_common.privacy.secret_stream import SECRET_BYTES
from fl_common.settings import parse_json
from fl_server.store.database.transactions import Home
from fl_server.store.errors import StoreError, disk_errors
from fl_server.store.objects.bucket import Bucket
from fl_server.store.objects.files import StoredFiles
from fl_server.store.records import ChargeRecord

LOCK = "lock"
MARKER = "impetus-state.json"
_MARKER_PART = MARKER + ".part"
_MARKER_CONTENT = {"program": "impetus-coordinator", "format": 1}
_HARMLESS = frozenset({LOCK, _MARKER_PART, "lost+found"})
"""Names that a new directory may contain: leftovers of an interrupted start, and a new volume's own folder."""
CHARGES = "charges.json"
COUNTS_FOLDER = "privacy-counts"


class StateDirectoryError(StoreError):
    """The directory cannot be this coordinator's state directory; the message says why and what to do."""


class DirectoryLocked(StateDirectoryError):
    """Another coordinator runs on the directory."""


class DirectoryLock(FileLock):
    """The right to a state directory, until `release` or the end of the process, in whatever way it ends."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(path / LOCK, holder)
        self.path = path

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
        return DirectoryLock(folder, json.dumps(holder))
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


class RunSecrets:
    """The files of one folder. Blocking."""

    def __init__(self, folder: Path, files: StoredFiles | None = None, outside: ChargeCounts | None = None) -> None:
        """files: the object store, if there is one. outside: its counts, for one who has no files."""
        self._folder, self._files = folder, files
        self._outside = outside if files is None else ChargeCounts(files.bucket, files.root)

    def path(self, run_id: str) -> Path:
        """The file of a run's secret."""
        return self._folder / f"{run_id}.key"

    def make(self, run_id: str) -> bytes:
        """A new secret, in its file. Raises StoreError."""
        secret = secrets.token_bytes(SECRET_BYTES)
        with disk_errors(f"write the secret of run {run_id!r}"):
            make_folders(self._folder, durable=True)
            with atomic_writer(self.path(run_id)) as file:  # mode 0600
                file.write(secret)
        if self._files is not None:
            self._files.put_files([self.path(run_id)])
        return secret

    def read(self, run_id: str) -> bytes:
        """The secret of a run. Raises StoreError if it is gone, or has another size."""
        if self._files is not None:
            self._agree(self._files, self.path(run_id))
        try:
            secret = self.path(run_id).read_bytes()
        except OSError as error:
            raise StoreError(
                f"the secret of the private run {run_id!r} cannot be read ({error.strerror}): restore "
                f"{self.path(run_id)} from a backup; without it cohorts and noise cannot go on"
            ) from error
        if len(secret) != SECRET_BYTES:
            raise StoreError(f"expected {SECRET_BYTES} bytes in {self.path(run_id)}, got {len(secret)}")
        return secret

    @staticmethod
    def _agree(files: StoredFiles, path: Path) -> None:
        """Copy a secret from the object store, or into it."""
        stored = files.find(files.name(path))
        if stored is not None and not path.exists():
            files.fetch(stored, path)
        elif stored is None and path.exists():
            files.put_files([path])

    def remove(self, run_id: str) -> None:
        """Remove the secret of a run, if there is one."""
        if self._files is not None:
            self._files.remove_file(self._files.name(self.path(run_id)))
        with disk_errors(f"remove the secret of run {run_id!r}"):
            self.path(run_id).unlink(missing_ok=True)

    def counted(self, charge: ChargeRecord) -> None:
        """Count a charge that is in the ledger."""
        counts = dict(self._counts())
        if charge.account not in counts:
            counts |= self.counts()
        charged = {name: getattr(charge, name) for name in ("number", "noise_multiplier", "rate", "fixed_size")}
        counts[charge.account] = _dearest(charged, counts.get(charge.account, charged))
        with disk_errors("count a privacy charge"):
            make_folders(self._folder, durable=True)
            with atomic_writer(self._folder / CHARGES) as file:
                file.write(json.dumps(counts).encode())
        if self._outside is not None:
            self._outside.put(charge.account, counts[charge.account])

    def missing(self, charges: Mapping[str, int]) -> list[ChargeRecord]:
        """The charges that were counted here and that the ledger does not have. charges: its number by account."""
        now = time.time()
        return [
            ChargeRecord(account, number, "", 0, 0, known["noise_multiplier"], known["rate"], now,
                         fixed_size=bool(known.get("fixed_size")))
            for account, known in self.counts().items()
            for number in range(charges.get(account, 0) + 1, known["number"] + 1)
        ]  # fmt: skip

    def not_counted(self, charges: Mapping[str, int]) -> dict[str, int]:
        """The accounts of which the ledger has more charges, with the least number that is counted. charges: as above.

        A coordinator was killed between the two.
        """
        places = [self._counts(), *([] if self._outside is None else [self._outside.all()])]
        here = {
            account: min(place[account]["number"] if account in place else 0 for place in places) for account in charges
        }
        return {account: number for account, number in here.items() if number < charges[account]}

    def counts(self) -> Mapping[str, Any]:
        """The counts of both places, by account."""
        counts = dict(self._counts())
        for account, outside in ({} if self._outside is None else self._outside.all()).items():
            counts[account] = _dearest(counts.get(account, outside), outside)
        return counts

    def _counts(self) -> Mapping[str, Any]:
        try:
            content = parse_json((self._folder / CHARGES).read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise StoreError(f"{self._folder / CHARGES} cannot be read ({error}): restore it from a backup") from error
        return content if isinstance(content, dict) else {}


def _dearest(count: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The count of an account by two counts of it: as many and as dear charges as either has."""
    return {
        "number": max(count["number"], other["number"]),
        "noise_multiplier": min(count["noise_multiplier"], other["noise_multiplier"]),
        "rate": max(count["rate"], other["rate"]),
        "fixed_size": bool(count.get("fixed_size")),
    }


class ChargeCounts:
    """The counts of one ledger's accounts in the object store. Blocking; raises StoreUnavailable while the store fails.

    LEDGER/privacy-counts/<hex of the account>/000000012        the count of one account up to a charge
    """

    def __init__(self, bucket: Bucket, root: str) -> None:
        """root: the id of the ledger."""
        self._bucket, self._folder = bucket, f"{root}/{COUNTS_FOLDER}"

    def put(self, account: str, count: Mapping[str, Any]) -> None:
        """Write the count of an account, durably, and remove its older ones."""
        folder = f"{self._folder}/{hashlib.sha256(account.encode()).hexdigest()}"
        content = json.dumps({"account": account, **count}).encode()
        newest = f"{folder}/{count['number']:09d}"
        self._bucket.put(newest, content, durable=True)
        self._bucket.delete([key for key, _ in self._bucket.keys(folder) if key < newest])

    def all(self) -> dict[str, dict[str, Any]]:
        """The newest count of each account."""
        newest: dict[str, str] = {}
        for key, _ in self._bucket.keys(self._folder):
            folder = key.rpartition("/")[0]
            newest[folder] = max(newest.get(folder, ""), key)
        counts = {}
        for key in newest.values():
            count = parse_json(self._bucket.get(key).decode())
            if not isinstance(count, dict):
                raise StoreError(f"expected the count of a privacy account in the object {key}, got something else")
            counts[str(count.pop("account"))] = count
        return counts
