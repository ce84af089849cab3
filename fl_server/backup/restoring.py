"""Restores a backup into an empty ledger.

A privacy account is never charged less than before: counts of charges that are newer than the backup, in the target's
object store and state directory, stay, and the first start charges what the restored ledger lacks. Where there are no
such counts, the operator says by name that nothing was released since the backup.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from sqlalchemy import inspect

from fl_common.settings import parse_json
from fl_server.backup.folder import Content, read_content
from fl_server.backup.tables import charged_accounts, read_tables
from fl_server.clients.fleet import FILE as DENIALS
from fl_server.leadership.opening import ledger_url
from fl_server.settings.config import ServerConfig
from fl_server.store.database.postgres import lock_opening
from fl_server.store.database.store import LEDGER
from fl_server.store.database.transactions import database_errors, engine_for, migrate, prepare_file
from fl_server.store.errors import StoreError
from fl_server.store.files import disk_errors
from fl_server.store.objects.bucket import Bucket
from fl_server.store.objects.charge_counts import ChargeCounts
from fl_server.store.run_secrets import COUNTS, RunSecrets
from fl_server.store.state_directory import lock_directory

KEPT = (DENIALS, f"privacy/{COUNTS}")
"""Files that stay where they are in the target: they are newer than the backup."""


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
            _require_counts(
                RunSecrets(config.state_dir / "privacy", outside=counts), charged_accounts(folder / "ledger")
            )
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
    for name in ("checkpoints", "spool", "cached-parts"):
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
