"""Makes a backup. With PostgreSQL and an object store the coordinator may run meanwhile; otherwise it must not.

The ledger is read in one transaction, then the objects that it counts. An object that was removed meanwhile, as those
of a committed round are, means that the ledger is read again: keys are written once, so what was copied stays right.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from blake3 import blake3
from sqlalchemy import select

from fl_server.backup.folder import Content, write_content
from fl_server.backup.tables import stored_files, write_tables
from fl_server.leadership.opening import ledger_url, may_stand_by
from fl_server.settings.config import ServerConfig
from fl_server.store.database import schema
from fl_server.store.database.store import LEDGER, Store, open_read_only
from fl_server.store.errors import StoreError
from fl_server.store.files import disk_errors
from fl_server.store.objects.bucket import Bucket, NoObject
from fl_server.store.state_directory import LOCK, MARKER, lock_directory

SNAPSHOTS = 20
"""Times that the ledger is read again because an object was removed."""
KEYS = {
    "tls": ("cert", "key", "client_ca"),
    "web_tls": ("cert", "key"),
    "enrollment": ("ca_cert", "ca_key", "server_ca"),
}
"""The keys of the settings with PEM files, by section."""
_COPIES = 8
_NOT_COPIED = {LOCK, MARKER, LEDGER, f"{LEDGER}-wal", f"{LEDGER}-shm", "cached-parts", "uploaded", "outside-calls"}
_WITH_OBJECTS = {"checkpoints", "spool"}
"""Folders of the state directory with copies of what an object store has."""


def make_backup(config: ServerConfig, folder: Path) -> Content:
    """Write a backup into a new folder. Raises StoreError; then there is no folder."""
    if folder.exists():
        raise StoreError(f"expected a new folder for the backup, got {folder}, which is there")
    part = folder.with_name(f"{folder.name}.part")
    with disk_errors(f"write the backup {folder}"), ExitStack() as held:
        if not may_stand_by(config):
            held.enter_context(lock_directory(config.state_dir))
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(mode=0o700, parents=True)
        ledger = open_read_only(ledger_url(config) or config.state_dir)
        held.callback(ledger.close)
        epoch = _copy_ledger(config, ledger, part)
        _copy_state(config, part / "state")
        _copy_keys(config, part / "keys")
        content = write_content(part, ledger.coordinator_id, epoch, has_objects=config.storage is not None)
        part.rename(folder)
    return content


def _copy_ledger(config: ServerConfig, ledger: Store, part: Path) -> int:
    """Copy the ledger and all objects that it counts. Returns its epoch."""
    rows, objects = part / "ledger", part / "objects"
    rows.mkdir()
    for _ in range(SNAPSHOTS):
        with ledger.snapshot() as db:
            write_tables(db, rows)
            epoch = int(db.execute(select(schema.identity.c.epoch)).scalar_one())
        if config.storage is None:
            return epoch
        keys = {key for file in stored_files(rows) for key in file.keys}
        if _copy_objects(Bucket(config.storage, config.objects), ledger.coordinator_id, keys, objects):
            return epoch
    raise StoreError(
        f"objects were removed while they were copied, {SNAPSHOTS} times: pause the runs, or use a faster disk"
    )


def _copy_objects(bucket: Bucket, root: str, keys: set[str], folder: Path) -> bool:
    """Copy objects, and remove copies of others. Returns False if one is not there."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if path.relative_to(folder).as_posix() not in keys:
            path.unlink()

    def copy(key: str) -> bool:
        try:
            data = bucket.get(f"{root}/{key}")
        except NoObject:
            return False
        if not key.endswith(f".{blake3(data).hexdigest()}"):
            raise StoreError(f"the object {key} in {bucket.url} is damaged: restore it from the store's own versions")
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return True

    with ThreadPoolExecutor(_COPIES) as pool:
        return all(pool.map(copy, [key for key in sorted(keys) if not (folder / key).exists()]))


def _copy_state(config: ServerConfig, folder: Path) -> None:
    """Copy the files of the state directory that belong to the ledger."""
    without = _NOT_COPIED | (_WITH_OBJECTS if config.storage is not None else set())
    folder.mkdir()
    for path in sorted(config.state_dir.iterdir()) if config.state_dir.is_dir() else ():
        if path.name in without or path.is_symlink():
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns(".*"))
        else:
            shutil.copyfile(path, folder / path.name)


def _copy_keys(config: ServerConfig, folder: Path) -> None:
    """Copy the PEM files that the settings name."""
    folder.mkdir()
    for section, names in KEYS.items():
        values = getattr(config, section)
        for name in names:
            path = None if values is None else getattr(values, name)
            if path is not None:
                shutil.copyfile(path, folder / f"{section}.{name}.pem")
