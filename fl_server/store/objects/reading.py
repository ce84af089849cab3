"""Reads whole files from an object store, part by part, with every digest checked; and the limit on local copies."""

from __future__ import annotations

import shutil
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from blake3 import blake3

from fl_common.files import make_folders
from fl_server.store.database.ledger_objects import StoredFile
from fl_server.store.errors import StoreUnavailable
from fl_server.store.files import disk_errors
from fl_server.store.objects.bucket import Bucket, NoObject

REQUESTS = 8
"""Requests at a time, and so the parts in memory."""
_FETCHED = ".fetched-"
_TRIES = 2
"""Reads of a part with a wrong digest: the first one may have been damaged on its way."""


class LocalCache:
    """Files and folders that may be removed, because the object store has them: the least recently used goes first.

    Thread-safe.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Path, int] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Bytes of all copies."""
        return self._bytes

    def add(self, path: Path, size: int) -> None:
        """A new copy. Older ones are removed to make room for it; the newest one stays, however large it is."""
        with self._lock:
            self._drop(path)
            self._sizes[path] = size
            self._bytes += size
            while self._bytes > self._most and len(self._sizes) > 1:
                oldest = next(iter(self._sizes))
                self._drop(oldest)
                _remove(oldest)

    def used(self, path: Path) -> None:
        """A copy was read."""
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)

    def forget(self, path: Path) -> None:
        """A copy, or all copies in a folder, are removed by others or must stay."""
        with self._lock:
            for known in [known for known in self._sizes if known == path or path in known.parents]:
                self._drop(known)

    def empty(self, folder: Path) -> None:
        """Remove a folder of copies, of an earlier process."""
        self.forget(folder)
        _remove(folder)

    def _drop(self, path: Path) -> None:
        self._bytes -= self._sizes.pop(path, 0)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class DamagedObject(StoreUnavailable):
    """An object that counts is gone or has other bytes than were written. It may be restored while a run waits."""


class ObjectReader:
    """Reads the files of one ledger. Blocking and thread-safe; raises StoreUnavailable while the store fails."""

    def __init__(self, bucket: Bucket, root: str) -> None:
        """root: the id of the ledger."""
        self.bucket, self.root = bucket, root
        self._pool = ThreadPoolExecutor(REQUESTS, thread_name_prefix="objects")

    def fetch(self, file: StoredFile, path: Path) -> None:
        """Make a local file from its parts. Raises DamagedObject."""
        make_folders(path.parent, durable=False)
        temporary, hasher = path.with_name(f"{_FETCHED}{threading.get_ident()}-{path.name}"), blake3()
        with disk_errors(f"write {path}"):
            try:
                with temporary.open("wb") as made:
                    for first in range(0, len(file.parts), REQUESTS):
                        for data in self._pool.map(partial(self.part, file.name), file.parts[first : first + REQUESTS]):
                            made.write(data)
                            hasher.update(data)
                if hasher.digest() != file.digest:
                    raise self._damaged(file.name, "it has another digest as a whole")
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    def part(self, name: str, part: str) -> bytes:
        """A part from the store, with its digest checked. Raises DamagedObject."""
        why = ""
        for _ in range(_TRIES):
            try:
                data = self.bucket.get(self._key(f"{name}/{part}"))
            except NoObject as error:
                why = str(error)
                continue
            if part.endswith(f".{blake3(data).hexdigest()}"):
                return data
            why = f"part {part} has another digest than its name"
        raise self._damaged(name, why)

    def _damaged(self, name: str, why: str) -> DamagedObject:
        return DamagedObject(f"{name} in {self.bucket.url} is damaged: {why}; restore it from the store's own versions")

    def close(self) -> None:
        """End the threads. What they have not put is put again later."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _key(self, key: str) -> str:
        return f"{self.root}/{key}"
