"""Checkpoints in an object store: all files of one count together, and its folder on the disk is a copy."""

from __future__ import annotations

import threading
from pathlib import Path

from fl_server.store.checkpoint_files import META
from fl_server.store.files import file_digest, remove_folder
from fl_server.store.objects.files import StoredFiles


class StoredCheckpoints:
    """The checkpoints below one directory. Blocking and thread-safe; raises StoreUnavailable."""

    def __init__(self, files: StoredFiles, directory: Path) -> None:
        self._files, self._directory = files, directory
        self._bringing = threading.Lock()
        self._newest: dict[Path, Path] = {}
        """The latest checkpoint of each run that was written or read: its copy stays, because its sums may be read."""

    def folders(self, run: Path) -> list[str]:
        """Names of the checkpoints of a run that count."""
        names = (name.rpartition("/") for name in self._files.names(self._files.name(run)))
        return sorted({Path(folder).name for folder, _, file in names if file == META})

    def put(self, folder: Path) -> None:
        """Put a checkpoint. When this returns, it counts and is durable; an older one of its round does not."""
        paths, name = sorted(folder.iterdir()), self._files.name(folder)
        known = set(self._files.names(name)) - {self._files.name(path) for path in paths}
        self._files.put_files(paths)
        for other in known:
            self._files.remove_file(other)
        self._keep(folder)

    def put_file(self, path: Path) -> None:
        """Put one file, durably."""
        self._files.put_files([path])

    def bring(self, path: Path) -> None:
        """Make the copy of a file, unless it is there or does not count. Raises DamagedObject."""
        stored = self._files.find(self._files.name(path))
        with self._bringing:
            if stored is not None and (not path.exists() or path.stat().st_size != stored.size_bytes):
                self._files.fetch(stored, path)

    def bring_all(self, folder: Path) -> None:
        """Make the copies of a checkpoint's files that are missing. Raises DamagedObject."""
        meta = folder / META
        stored = self._files.find(self._files.name(meta))
        if stored is not None and meta.exists() and file_digest(meta) != stored.digest:
            remove_folder(folder, f"remove {folder}, which is not the checkpoint that counts")
        for name in self._files.names(self._files.name(folder)):
            self.bring(self._directory / Path(name).relative_to(self._files.name(self._directory)))
        self._keep(folder)

    def remove(self, folder: Path) -> None:
        """Let the checkpoints in a folder count no more."""
        self._files.remove(self._files.name(folder))

    def _keep(self, folder: Path) -> None:
        """Keep the copy of a run's newest checkpoint; others may go when there is no room for them."""
        cache, before = self._files.cache, self._newest.get(folder.parent)
        newest = folder if before is None or not before.exists() or _round(folder) >= _round(before) else before
        self._newest[folder.parent] = newest
        cache.forget(newest)
        for other in {folder, before} - {newest, None}:
            if other is not None and other.exists():
                cache.add(other, sum(file.stat().st_size for file in other.iterdir()))


def _round(folder: Path) -> int:
    number = folder.name.removeprefix("round-")
    return int(number) if number.isdecimal() else -1
