"""The object store of a life, in memory, behind the product's own seam at bytes: put, get, list, delete.

Each request is an effect of the coordinator. Besides kills, it may fail before it is done, or after, so that its answer
is lost; every second one may be refused, as by a store that is too busy; or it may be done some seconds after the death
of its process, which is how a leader that was replaced still writes. At each request the ledger is compared with the
store: what counts is there.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from fl_server.settings.config import ServerConfig
from fl_server.store.ledger import Ledger
from fl_server.store.objects.bucket import Bucket, NoObject
from fl_server.store.objects.files import StoredFiles
from fl_server.store.objects.local_cache import LocalCache
from tests.deterministic.effects import Effects
from tests.deterministic.loop import AtOnce
from tests.deterministic.seen import Seen

URL = "simulated://objects"
LOCAL = ("spool", "checkpoints", "cached-parts")
"""Folders of the state directory that have copies only: a coordinator may lose them with its machine."""


class ObjectStore:
    """What is in the store, for all processes of a life."""

    def __init__(self, ledger: Path, seen: Seen) -> None:
        """ledger: the file of the coordinator's ledger."""
        self._ledger, self._seen = ledger, seen
        self.there: dict[str, bytes] = {}
        self.put_late: set[str] = set()
        """Keys that a dead process has put."""

    def put(self, key: str, data: bytes, *, late: bool = False) -> None:
        """Write an object."""
        if late:
            self.put_late.add(key)
        self.there[key] = data
        self.check()

    def delete(self, keys: list[str]) -> None:
        """Remove objects."""
        for key in keys:
            self.there.pop(key, None)
        self.check()

    def check(self) -> None:
        """Each part of each file that counts is there."""
        for key in self._counted():
            if key not in self.there and not self._seen.violations:
                self._seen.violations.append(f"what the ledger counts is in the store: not {key}")

    def _counted(self) -> list[str]:
        """The keys of all parts that count, as the ledger has them on its disk."""
        if not self._ledger.exists():
            return []
        with closing(sqlite3.connect(self._ledger)) as db:
            try:
                rows = db.execute("SELECT name, parts, coordinator_id FROM objects, identity").fetchall()
            except sqlite3.OperationalError as error:
                if "no such table" not in str(error):  # the first start makes them
                    raise
                return []
        return [f"{ledger}/{name}/{part}" for name, parts, ledger in rows for part in json.loads(parts)]


class ModelledBucket(Bucket):
    """The product's seam. Its requests are not repeated: a failure reaches the caller, as after the last repetition."""

    def __init__(self, store: ObjectStore, effects: Effects) -> None:
        self.url = URL
        self._model, self._effects = store, effects

    def put(self, key: str, data: bytes | memoryview, *, durable: bool = False) -> None:
        del durable
        whole = bytes(data)
        self._effects.perform(
            "store:put", lambda: self._model.put(key, whole), late=lambda: self._model.put(key, whole, late=True)
        )

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        data: bytes | None = self._effects.perform("store:get", lambda: self._model.there.get(key))
        if data is None or (length is not None and len(data) < start + length):
            raise NoObject(f"could not get {key}: there is no such object, or it is shorter")
        return data[start:] if length is None else data[start : start + length]

    def keys(self, folder: str) -> list[tuple[str, int]]:
        prefix = f"{folder}/" if folder else ""
        found = self._effects.perform("store:list", lambda: dict(self._model.there))
        return [(key, len(data)) for key, data in sorted(found.items()) if key.startswith(prefix)]

    def delete(self, keys: list[str]) -> None:  # type: ignore[override]  # a list here
        removed = list(keys)
        self._effects.perform(
            "store:delete", lambda: self._model.delete(removed), late=lambda: self._model.delete(removed)
        )

    def remove_temporary(self) -> None:
        """Nothing: it is no folder."""


def stored_files(store: ObjectStore, effects: Effects, ledger: Ledger, config: ServerConfig) -> StoredFiles:
    """The product's files in the store, whose requests run within the call."""
    files = StoredFiles(ModelledBucket(store, effects), ledger, config.state_dir, LocalCache(1 << 30))
    files._pool = AtOnce()  # type: ignore[assignment]  # in place of threads
    return files
