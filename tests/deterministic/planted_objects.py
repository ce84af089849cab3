"""Faults planted into the use of the object store, which only lives with a store find."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any

from blake3 import blake3

from fl_server.run import restore
from fl_server.run.run import Run
from fl_server.store.errors import StoreError, StoreUnavailable
from fl_server.store.objects.files import StoredFiles
from tests.deterministic.planted import Patch


def _failed_put_counts() -> Patch:
    def send(self: StoredFiles, name: str, number: int, data: bytes, *, durable: bool) -> str:
        part = f"{number:05d}.{self.epoch}-{next(self._counts)}.{blake3(data).hexdigest()}"
        with suppress(StoreUnavailable):
            self.bucket.put(self._key(f"{name}/{part}"), data, durable=durable)
        with self._lock:
            self._loose.setdefault(name, {})[part] = len(data)
        return part

    return StoredFiles, "send", send


def _removed_before_written() -> Patch:
    removed = StoredFiles._removed

    def at_once(self: StoredFiles, names: Sequence[str], loose: Sequence[str]) -> None:
        files = [self._files[name] for name in names if name in self._files]
        keys = [*loose, *(key for file in files for key in file.keys)]
        self.bucket.delete([self._key(key) for key in keys])
        removed(self, names, loose)

    return StoredFiles, "_removed", at_once


def _names_again() -> Patch:
    send = StoredFiles.send

    def named(self: StoredFiles, name: str, number: int, data: bytes, *, durable: bool) -> str:
        self.epoch, self._counts = 0, repeat(0)  # type: ignore[assignment]
        return send(self, name, number, data, durable=durable)

    return StoredFiles, "send", named


def _unanswered_stays() -> Patch:
    remove_objects = StoredFiles.remove_objects

    def removed(self: StoredFiles, most: int = 1000) -> bool:
        self._unsure.clear()
        return remove_objects(self, most)

    return StoredFiles, "remove_objects", removed


def _full_disk_fails() -> Patch:
    async def why_failed(run: Run, work: Coroutine[Any, Any, None]) -> str:
        try:
            await work
        except StoreUnavailable:
            raise
        except StoreError as error:
            return f"its state cannot be read: {error}"
        return ""

    return restore, "_why_failed", why_failed


STORED: dict[str, Callable[[], Patch]] = {
    "a part whose request failed counts": _failed_put_counts,
    "objects are removed before their removal is written": _removed_before_written,
    "a part that is put again has its earlier name": _names_again,
    "a part whose answer was lost stays": _unanswered_stays,
    "a restart without room for a copy fails the run": _full_disk_fails,
}
