"""Records the operations of a program on a folder, call by call, as a drive receives them.

Calls of `os` and `open` on a path in the folder are passed on. Before and after each call the folder is compared with
its last recorded state, and the differences are recorded. So changes by other code, such as a library in another
language, are recorded with the next call at the latest. Files are identified by their inode, so a rename is one change
of two names. The ledger's database is not compared: each commit is recorded, with a copy and with whether SQLite syncs
it (`PRAGMA synchronous` of the committing connection).
"""

from __future__ import annotations

import builtins
import io
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine.default import DefaultDialect

LEDGER = "ledger.sqlite"
_OS_CALLS = (
    "open", "write", "pwrite", "ftruncate", "posix_fallocate", "rename", "replace", "unlink", "remove", "mkdir",
    "rmdir", "fsync", "fdatasync",
)  # fmt: skip
_SYNCS = ("fsync", "fdatasync")
_FULL = 2
"""Value of `PRAGMA synchronous`: the log is synced at the end of each transaction."""


@dataclass(frozen=True, slots=True)
class Node:
    """A file or a folder, independent of its name."""

    number: int
    is_folder: bool


@dataclass(frozen=True, slots=True)
class Named:
    """Names of a folder changed at once: to another node, or to None for a removed name."""

    folder: Node
    changes: dict[str, Node | None]


@dataclass(frozen=True, slots=True)
class Written:
    """A file's complete new content, as a reader sees it."""

    file: Node
    content: bytes


@dataclass(frozen=True, slots=True)
class Synced:
    """The drive has confirmed a file's content or a folder's names."""

    node: Node


@dataclass(frozen=True, slots=True)
class Committed:
    """A transaction of the database was committed."""

    image: bytes
    synced: bool


@dataclass(frozen=True, slots=True)
class Reported:
    """A message that a power cut must not contradict."""

    what: Any


Operation = Named | Written | Synced | Committed | Reported
ROOT = Node(0, is_folder=True)


def renames(record: Sequence[Operation]) -> list[int]:
    """Numbers of the operations, from 1, that gave a file or folder another name."""
    changes = {at: each.changes.values() for at, each in enumerate(record, 1) if isinstance(each, Named)}
    return [at for at, to in changes.items() if None in to and any(to)]


class Recorder:
    """The record of one folder. It is empty at the start, and its own name counts as durable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record: list[Operation] = []
        self._lock = threading.RLock()
        self._names: dict[Node, dict[str, Node]] = {ROOT: {}}
        self._content: dict[Node, bytes] = {}
        self._inodes: dict[int, Node] = {}
        self._image = b""
        self._made = 0

    def adopt(self, paths: Mapping[str, Node], record: Sequence[Operation]) -> None:
        """Continue the record of a killed process in a copy of its files. paths: path -> node."""
        self.record = list(record)
        nodes = {"": ROOT, **paths}
        for path, node in paths.items():
            file, (above, _, name) = self.folder / path, path.rpartition("/")
            self._inodes[file.stat().st_ino] = node
            self._names[nodes[above]][name] = node
            if node.is_folder:
                self._names[node] = {}
            else:
                self._content[node] = file.read_bytes()
        changes = [each.changes for each in record if isinstance(each, Named)]
        self._made = max((node.number for each in changes for node in each.values() if node), default=0)
        self._image = next((each.image for each in reversed(record) if isinstance(each, Committed)), b"")

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operations of the body, with a last comparison at its end."""
        with pytest.MonkeyPatch.context() as patch:
            for name in _OS_CALLS:
                patch.setattr(os, name, self._recording(name, getattr(os, name)))
            for module in (io, builtins):
                patch.setattr(module, "open", self._recording("open", module.open))
            patch.setattr(DefaultDialect, "do_commit", self._recording_commit(DefaultDialect.do_commit))
            yield
            with self._lock:
                self._compare()

    def report(self, what: Any) -> None:
        """Add a message after all recorded operations."""
        with self._lock:
            self._compare()
            self.record.append(Reported(what))

    def _recording(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recording(*args: Any, **kwargs: Any) -> Any:
            path = self._path_of(args[0] if kwargs.get("dir_fd") is None else kwargs["dir_fd"])
            if path is None:
                return call(*args, **kwargs)
            with self._lock:
                self._compare()
                result = call(*args, **kwargs)
                if name in _SYNCS:
                    self._sync(path)
                else:
                    self._compare()
                return result

        return recording

    def _path_of(self, target: Any) -> Path | None:
        """The path of a path or an open descriptor in the folder; None if it is outside."""
        if isinstance(target, int):
            try:
                target = Path(f"/proc/self/fd/{target}").readlink()
            except OSError:
                return None
        path = Path(os.fsdecode(target)).absolute()
        return path if path.is_relative_to(self.folder) else None

    def _sync(self, path: Path) -> None:
        node: Node | None = ROOT
        for name in path.relative_to(self.folder).parts:
            node = self._names.get(node, {}).get(name) if node else None
        if node is not None:  # None if it was removed while it was open
            self.record.append(Synced(node))

    def _recording_commit(self, commit: Callable[..., None]) -> Callable[..., None]:
        def ending(dialect: DefaultDialect, connection: Any) -> None:
            files = [row[2] for row in connection.execute("PRAGMA database_list")]
            if not any(map(self._path_of, filter(None, files))):
                commit(dialect, connection)
                return
            with self._lock:
                self._compare()
                commit(dialect, connection)
                image = connection.serialize()
                if image != self._image:
                    synced = connection.execute("PRAGMA synchronous").fetchone()[0] >= _FULL
                    self._image = image
                    self.record.append(Committed(image, synced))

        return ending

    def _compare(self) -> None:
        """Record how the folder differs from its last recorded state."""
        self._compare_folder(self.folder, ROOT)

    def _compare_folder(self, path: Path, folder: Node) -> None:
        with os.scandir(path) as entries:
            found = {each.name: each for each in entries if not each.name.startswith(f"{LEDGER}-")}
        before = self._names[folder]
        here = {each.inode() for each in found.values()}
        for inode in [number for number, node in self._inodes.items() if node in before.values()]:
            if inode not in here:
                del self._inodes[inode]  # the next file with this inode is another node
        now = {name: self._node(entry) for name, entry in found.items()}
        changes = {name: now.get(name) for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
        if changes:
            self.record.append(Named(folder, changes))
            self._names[folder] = now
        for name, node in now.items():
            if node.is_folder:
                self._compare_folder(path / name, node)
            elif name != LEDGER:
                self._read(path / name, node)

    def _node(self, entry: os.DirEntry[str]) -> Node:
        inode = entry.inode()
        if inode not in self._inodes:
            self._made += 1
            node = self._inodes[inode] = Node(self._made, is_folder=entry.is_dir(follow_symlinks=False))
            if node.is_folder:
                self._names[node] = {}
            else:
                self._content[node] = b""
        return self._inodes[inode]

    def _read(self, path: Path, node: Node) -> None:
        try:
            with io.FileIO(path) as file:
                content = file.readall()
        except FileNotFoundError:  # other code has just renamed it; the next comparison records that
            return
        if content != self._content[node]:
            self._content[node] = content
            self.record.append(Written(node, content))
