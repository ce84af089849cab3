"""`fl-server backup` and `fl-server restore`: ledger, files, keys and privacy accounts together.

With PostgreSQL and an object store the coordinator may run while a backup is made; otherwise it must not.

The ledger is read in one transaction, then the objects that it counts. An object that was removed meanwhile, as those
of a committed round are, means that the ledger is read again: keys are written once, so what was copied stays right.

A backup is restored into an empty ledger. A privacy account is never charged less than before: counts of charges that
are newer than the backup, in the target's object store and state directory, stay, and the first start charges what the
restored ledger lacks. Where there are no such counts, the operator says by name that nothing was released since.

A backup is a folder; damage to a file of it is found:

backup.json            ledger, time, and the digest of each file
ledger/TABLE.jsonl     the rows of the ledger, a JSON array for each, the same for SQLite and PostgreSQL
objects/KEY            objects that the ledger counts, below its own folder in the object store
state/...              files of the state directory: secrets of private runs, counts of charges, denials, the head of
                       the audit log; without an object store checkpoints and updates too
keys/NAME              the PEM files that the settings name
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from blake3 import blake3
from sqlalchemy import Column, Connection, LargeBinary, Table, insert, inspect, select

from fl_common.files import atomic_writer, fsync_path, set_private_umask
from fl_common.settings import SettingsError, parse_json, read_settings
from fl_common.units import counted
from fl_server.clients.fleet import FILE as DENIALS
from fl_server.leadership import ledger_url, may_stand_by
from fl_server.settings.config import ServerConfig
from fl_server.store.database import lease, schema
from fl_server.store.database.engines import count_on, database_errors, engine_for, lock_opening, prepare_file
from fl_server.store.database.migrations.schema_version import migrate
from fl_server.store.database.schema import charges, identity, metadata
from fl_server.store.database.store import LEDGER, Store, StoredFile, objects, open_read_only
from fl_server.store.errors import StoreError, disk_errors, file_digest
from fl_server.store.objects.bucket import Bucket, NoObject
from fl_server.store.state_directory import CHARGES, LOCK, MARKER, ChargeCounts, RunSecrets, lock_directory

CONTENT = "backup.json"
FORMAT = 1


AT_ONCE = 500
"""Rows in one statement."""
EPOCHS = 1000
"""A restored ledger counts its openings from so many more on: no coordinator of before has such an epoch."""
_PASSING = {lease.leadership.name, lease.standbys.name}
"""Tables that say who leads now."""
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
_WITH_OBJECTS = {"checkpoints", "spool", "releases", "packages"}
"""Folders of the state directory with copies of what an object store has."""
KEPT = (DENIALS, f"privacy/{CHARGES}")
"""Files that stay where they are in the target: they are newer than the backup."""
EXIT_OK, EXIT_FAILED = 0, 2
_ABOUT = {
    "backup": "Write ledger, checkpoints, updates, keys and privacy accounts into a new folder. With a ledger in "
    "PostgreSQL and an object store the coordinator may run; otherwise stop it first.",
    "restore": "Restore a backup into an empty database or state directory. Keys are copied by hand from its folder.",
}


@dataclass(frozen=True, slots=True)
class Content:
    """What a backup says of itself."""

    ledger: str
    """Id of the ledger."""
    epoch: int
    has_objects: bool
    """Whether checkpoints and updates were in an object store."""
    made_at: float
    digests: dict[str, str]
    """BLAKE3-256 of each file, in hex, by its path in the folder."""


def write_content(folder: Path, ledger: str, epoch: int, *, has_objects: bool) -> Content:
    """Make the files of a backup durable, and write what they are."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CONTENT)
    with disk_errors(f"write the backup {folder}"):
        for path in [*paths, *(path for path in folder.rglob("*") if path.is_dir()), folder]:
            fsync_path(path)
        digests = {path.relative_to(folder).as_posix(): file_digest(path).hex() for path in paths}
        content = Content(ledger, epoch, has_objects, time.time(), digests)
        with atomic_writer(folder / CONTENT) as file:
            file.write(json.dumps({"format": FORMAT, **asdict(content)}, indent=1).encode())
    return content


def read_content(folder: Path) -> Content:
    """What a backup is. Raises StoreError if a file of it is missing or has other bytes."""
    try:
        values = parse_json((folder / CONTENT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"expected a whole backup in {folder}, got no {CONTENT} ({error})") from error
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise StoreError(f"{folder} has another format than {FORMAT}: use the version of fl-server that made it")
    content = Content(**values)
    for name, digest in content.digests.items():
        path = folder / name
        if not path.is_file() or file_digest(path).hex() != digest:
            raise StoreError(f"the backup is damaged: {path} is missing or has other bytes than were written")
    return content


def tables() -> list[Table]:
    """The tables of a backup; one comes after those that it refers to."""
    return [table for table in metadata.sorted_tables if table.name not in _PASSING]


def write_tables(db: Connection, folder: Path) -> None:
    """Write all tables of one transaction."""
    for table in tables():
        with (folder / f"{table.name}.jsonl").open("w", encoding="utf-8") as file:
            json.dump([column.name for column in table.columns], file)
            file.write("\n")
            for row in db.execution_options(yield_per=AT_ONCE).execute(select(table)):
                json.dump([_plain(column, value) for column, value in zip(table.columns, row, strict=True)], file)
                file.write("\n")


def read_tables(db: Connection, folder: Path, storage: str) -> None:
    """Fill the empty tables of a ledger, whose files are in `storage` from now on, and which has no directory yet."""
    for table in tables():
        rows = _rows(table, folder)
        while some := list(islice(rows, AT_ONCE)):
            db.execute(insert(table), some)
        count_on(db, table)
    db.execute(identity.update().values(epoch=identity.c.epoch + EPOCHS, directory="", storage=storage))


def stored_files(folder: Path) -> list[StoredFile]:
    """The files in the object store that a backup's ledger counts."""
    return [StoredFile(**{**row, "parts": tuple(row["parts"])}) for row in _rows(objects, folder)]


def charged_accounts(folder: Path) -> set[str]:
    """The privacy accounts with charges."""
    return {row["account"] for row in _rows(charges, folder)}


def _rows(table: Table, folder: Path) -> Iterator[dict[str, Any]]:
    with (folder / f"{table.name}.jsonl").open(encoding="utf-8") as file:
        names = json.loads(file.readline())
        if unknown := set(names) - set(table.columns.keys()):
            raise StoreError(f"the backup's table {table.name} has the columns {', '.join(sorted(unknown))}: use the "
                             "version of fl-server that made it")  # fmt: skip
        for line in file:
            values = zip(names, json.loads(line), strict=True)
            yield {name: _value(table.columns[name], value) for name, value in values}


def _plain(column: Column[Any], value: Any) -> Any:
    if isinstance(column.type, LargeBinary) and value is not None:
        return base64.b64encode(value).decode()
    return value


def _value(column: Column[Any], value: Any) -> Any:
    if isinstance(column.type, LargeBinary) and value is not None:
        return base64.b64decode(value)
    return value


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


def restore_backup(config: ServerConfig, folder: Path, *, without_counts: bool = False) -> Content:
    """Restore a backup into the ledger, object store and state directory of these settings.

    without_counts: nothing was released from privacy accounts since the backup. Raises StoreError, before anything is
    written if the backup is damaged or the target is not empty.
    """
    content = read_content(folder)
    if content.has_objects != (config.storage is not None):
        was, is_ = ("an object store", "none") if content.has_objects else ("no object store", config.storage)
        raise StoreError(f"the backup is of a coordinator with {was}, and `storage` names {is_}: set it alike")
    with lock_directory(config.state_dir) as lock, disk_errors(f"restore the backup {folder}"):
        if lock.home.ledger not in {"", content.ledger}:
            raise StoreError(f"the state directory belongs to another ledger, {lock.home.ledger}: name a new one")
        bucket = None if config.storage is None else Bucket(config.storage, config.objects)
        counts = None if bucket is None else ChargeCounts(bucket, content.ledger)
        if not without_counts:
            secrets = RunSecrets(config.state_dir / "privacy", outside=counts)
            _require_counts(secrets, charged_accounts(folder / "ledger"))
        if bucket is not None:
            _put_objects(bucket, content.ledger, folder / "objects")
        _restore_state(config, folder / "state")
        _restore_ledger(config, folder / "ledger")
        lock.keep_ledger(content.ledger)
    return content


def _require_counts(secrets: RunSecrets, accounts: set[str]) -> None:
    if lacking := sorted(accounts - set(secrets.counts())):
        raise StoreError(
            f"the backup has charges of the privacy accounts {', '.join(lacking)}, and neither the object store nor "
            "the state directory has their newer count (privacy/charges.json): restore that file first. If nothing was "
            "released since the backup, say so with --without-counts"
        )


def _put_objects(bucket: Bucket, root: str, folder: Path) -> None:
    there = dict(bucket.keys(root))
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        key = f"{root}/{path.relative_to(folder).as_posix()}"
        if there.get(key) != path.stat().st_size:
            bucket.put(key, path.read_bytes(), durable=True)


def _restore_state(config: ServerConfig, folder: Path) -> None:
    for name in (*sorted(_WITH_OBJECTS), "cached-parts"):
        shutil.rmtree(config.state_dir / name, ignore_errors=True)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        file = path.relative_to(folder)
        target = config.state_dir / file
        if file.as_posix() in KEPT and target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for denials in {config.denials_file or config.state_dir / DENIALS, *config.state_dir.glob("denials*.json")}:
        if denials.exists():  # all of it applies to the restored ledger
            lists = parse_json(denials.read_text(encoding="utf-8"))
            if isinstance(lists, dict) and lists.pop("epoch", None) is not None:
                denials.write_text(json.dumps(lists, indent=1), encoding="utf-8")


def _restore_ledger(config: ServerConfig, folder: Path) -> None:
    url = ledger_url(config)
    if url is None:
        prepare_file(config.state_dir / LEDGER)
    engine = engine_for(url or f"sqlite:///{config.state_dir / LEDGER}")
    try:
        with database_errors("restore the ledger"), engine.execution_options(fsynced=True).begin() as db:
            if url is not None:
                lock_opening(db)
            if inspect(db).get_table_names():
                raise StoreError(
                    "expected an empty ledger to restore into: name an empty database, schema or state_dir"
                )
            migrate(db)
            read_tables(db, folder, config.storage or "")
    finally:
        engine.dispose()


def parser_of(command: str) -> argparse.ArgumentParser:
    """The arguments of "backup" or "restore"."""
    parser = argparse.ArgumentParser(f"fl-server {command}", description=_ABOUT[command])
    parser.add_argument("--config", type=Path, required=True, action="append", metavar="FILE", help="settings in TOML")
    where = "new folder of the backup" if command == "backup" else "folder of the backup"
    option = "--to" if command == "backup" else "--from"
    parser.add_argument(option, dest="folder", type=Path, required=True, help=where)
    if command == "restore":
        about = "nothing was released from privacy accounts since the backup"
        parser.add_argument("--without-counts", action="store_true", help=about)
    return parser


def run(command: str, arguments: Sequence[str]) -> int:
    """Make or restore a backup. Returns the exit code."""
    options = parser_of(command).parse_args(arguments)
    set_private_umask()
    try:
        config = read_settings(options.config[0], ServerConfig, options.config[1:])
        if command == "backup":
            content = make_backup(config, options.folder)
        else:
            content = restore_backup(config, options.folder, without_counts=options.without_counts)
    except (SettingsError, StoreError) as error:
        print(f"fl-server: {error}", file=sys.stderr)
        return EXIT_FAILED
    done = "written" if command == "backup" else "restored"
    print(f"{done}: ledger {content.ledger}, {counted(len(content.digests), 'file')}, in {options.folder}")
    return EXIT_OK
