"""Writes down what a program does to a folder, call by call, as a drive would hear it.

Calls of `os` and `open` on something in the folder are passed on; before and after each the folder is looked at, and
what differs from the last look is written down. So also what other code wrote, such as a library in another language,
is there, at the latest with the next call. Files are told by their inode, so a rename is one change of two names.
The ledger's database is not looked into: each transaction's end is written down, with a copy and with whether SQLite
was to sync it (`PRAGMA synchronous` of the connection that ended it).
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
"""Of `PRAGMA synchronous`: the log is synced at the end of each transaction."""


@dataclass(frozen=True, slots=True)
class Node:
    """A file or a folder, whatever it is called."""

    number: int
    is_folder: bool


@dataclass(frozen=True, slots=True)
class Named:
    """Names of a folder changed, all at once: to another node, or to None where a name is gone."""

    folder: Node
    changes: dict[str, Node | None]


@dataclass(frozen=True, slots=True)
class Written:
    """A file's whole content, as reading it would show."""

    file: Node
    content: bytes


@dataclass(frozen=True, slots=True)
class Synced:
    """The drive said that it has a file's content, or a folder's names."""

    node: Node


@dataclass(frozen=True, slots=True)
class Ended:
    """A transaction of the database came to its end."""

    image: bytes
    synced: bool


@dataclass(frozen=True, slots=True)
class Told:
    """Somebody elsewhere was told something that a power cut must not make untrue."""

    what: Any


Operation = Named | Written | Synced | Ended | Told
ROOT = Node(0, is_folder=True)


def renames(record: Sequence[Operation]) -> list[int]:
    """Numbers of the operations, from 1, that gave a file or folder another name."""
    changes = {at: each.changes.values() for at, each in enumerate(record, 1) if isinstance(each, Named)}
    return [at for at, to in changes.items() if None in to and any(to)]


class Recorder:
    """The record of one folder, which is empty at first and whose own name is taken for durable."""

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
        """Go on with the record of a process that was killed, in a copy of what it left: by path, which node it was."""
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
        self._image = next((each.image for each in reversed(record) if isinstance(each, Ended)), b"")

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Write down what is done in the body; a last look ends it."""
        with pytest.MonkeyPatch.context() as patch:
            for name in _OS_CALLS:
                patch.setattr(os, name, self._watched(name, getattr(os, name)))
            for module in (io, builtins):
                patch.setattr(module, "open", self._watched("open", module.open))
            patch.setattr(DefaultDialect, "do_commit", self._ending(DefaultDialect.do_commit))
            yield
            with self._lock:
                self._look()

    def tell(self, what: Any) -> None:
        """Something was told, after all that has been written down."""
        with self._lock:
            self._look()
            self.record.append(Told(what))

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            path = self._path_of(args[0] if kwargs.get("dir_fd") is None else kwargs["dir_fd"])
            if path is None:
                return call(*args, **kwargs)
            with self._lock:
                self._look()
                result = call(*args, **kwargs)
                if name in _SYNCS:
                    self._sync(path)
                else:
                    self._look()
                return result

        return watched

    def _path_of(self, target: Any) -> Path | None:
        """Where in the folder a path or an open descriptor leads; None for elsewhere."""
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
        if node is not None:  # it has no name any more where it was removed while it was open
            self.record.append(Synced(node))

    def _ending(self, commit: Callable[..., None]) -> Callable[..., None]:
        def ending(dialect: DefaultDialect, connection: Any) -> None:
            files = [row[2] for row in connection.execute("PRAGMA database_list")]
            if not any(map(self._path_of, filter(None, files))):
                commit(dialect, connection)
                return
            with self._lock:
                self._look()
                commit(dialect, connection)
                image = connection.serialize()
                if image != self._image:
                    synced = connection.execute("PRAGMA synchronous").fetchone()[0] >= _FULL
                    self._image = image
                    self.record.append(Ended(image, synced))

        return ending

    def _look(self) -> None:
        """Write down how the folder differs from the last look."""
        self._look_into(self.folder, ROOT)

    def _look_into(self, path: Path, folder: Node) -> None:
        with os.scandir(path) as entries:
            found = {each.name: each for each in entries if not each.name.startswith(f"{LEDGER}-")}
        before = self._names[folder]
        here = {each.inode() for each in found.values()}
        for inode in [number for number, node in self._inodes.items() if node in before.values()]:
            if inode not in here:
                del self._inodes[inode]  # free for the next file, which is another node
        now = {name: self._node(entry) for name, entry in found.items()}
        changes = {name: now.get(name) for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
        if changes:
            self.record.append(Named(folder, changes))
            self._names[folder] = now
        for name, node in now.items():
            if node.is_folder:
                self._look_into(path / name, node)
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
        except FileNotFoundError:  # other code has just renamed it, and the next look will tell
            return
        if content != self._content[node]:
            self._content[node] = content
            self.record.append(Written(node, content))
