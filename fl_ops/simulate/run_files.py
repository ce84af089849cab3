"""Files of a run in progress: scratch folders, updates of a round, and client states such as SCAFFOLD's c_i.

The folders are in memory if their files are small, otherwise on disk, and are removed at the end of the run.
"""

from __future__ import annotations

import operator
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from torch import Tensor

from algorithms import tree
from algorithms.base import Memory
from fl_client.storage import client_state_store
from fl_client.storage.client_state_store import NextState
from fl_common.files import FileLock, FileLocked
from fl_ops.files import file_name
from protos.chunks import Buffer

MEMORY_DISK = Path("/dev/shm")  # noqa: S108 - only folders of a random name are made in it
MEMORY_SHARE = 0.25
"""Files are in memory up to this share of what is free there when the run begins."""
_PREFIX = "fl-scratch-"
_LOCK = ".in-use"
_NEW_S = 60.0
"""Folders younger than this are left alone: their process may not have locked them yet."""


class ScratchFolder:
    """A folder until `cleanup`, or until the end of the process. Its process holds a lock in it."""

    def __init__(self, kind: str, size: int | None) -> None:
        """size: of its files together, at most, in bytes. None: they are not in memory."""
        in_memory = size is not None and MEMORY_DISK.is_dir() and size <= MEMORY_SHARE * free_memory()
        parent = MEMORY_DISK if in_memory else Path(gettempdir())
        _remove_abandoned(parent)
        self._folder = TemporaryDirectory(prefix=f"{_PREFIX}{kind}-", dir=parent)
        self.path = Path(self._folder.name)
        self._lock = FileLock(self.path / _LOCK, str(os.getpid()))

    def cleanup(self) -> None:
        """Remove the folder with all files. A second call does nothing."""
        self._folder.cleanup()
        self._lock.release()


def free_memory() -> int:
    """Bytes of files that memory has room for; 0 where it holds no files."""
    return shutil.disk_usage(MEMORY_DISK).free if MEMORY_DISK.is_dir() else 0


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that were killed: nobody holds their locks."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            facts = lock.stat()
            if facts.st_uid != os.getuid() or time.time() - facts.st_mtime < _NEW_S:
                continue
            held = FileLock(lock, "")
        except (FileLocked, OSError):
            continue
        shutil.rmtree(lock.parent, ignore_errors=True)
        held.release()


class UpdateFiles:
    """Updates by exchange and client. Several processes may write at the same time, each of other clients."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._updates, self._spare = folder, folder / "updates", folder / "spare"
        for each in (self._updates, self._spare):
            each.mkdir()
        self._emptied = 0

    def write(self, exchange: int, client: str, pieces: Iterable[Buffer]) -> Path:
        """Write a client's update in an exchange, in place of an earlier one. Raises OSError."""
        path = self._updates / f"{exchange}-{client}"
        if not path.exists():
            self._take_spare(path)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            file.writelines(pieces)
            file.truncate()
        return path

    def remove(self, path: Path) -> None:
        """Remove an update."""
        self._emptied += 1
        path.replace(self._spare / f"{os.getpid()}-{self._emptied}")

    def empty(self) -> None:
        """Remove all updates."""
        for path in self._updates.iterdir():
            self.remove(path)

    def _take_spare(self, path: Path) -> None:
        for spare in self._spare.iterdir():
            with suppress(FileNotFoundError):  # another process has taken it
                spare.rename(path)
                return


_STATE, _AT_ONE, _AT_ZERO = "state", "next/at-one", "next/at-zero"
KEPT, NEXT = (_STATE,), (_AT_ONE, _AT_ZERO)
"""The kinds of the files of a client's state, and of its state after a round whose outcome is unknown."""


class SimulatedStates:
    """The clients' states in a folder. Several processes may use one folder, if each client is in one at a time."""

    def __init__(self, folder: Path) -> None:
        for kind in (*KEPT, *NEXT):
            (folder / kind).mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.changed: set[str] = set()
        """Clients whose state was replaced since a save emptied this set."""

    def get(self, client: str) -> Memory | None:
        """A client's state after its last round that counted; None before it."""
        return self._read(client, _STATE)

    def put_next(self, client: str, state: NextState) -> None:
        """Write the state after a round whose outcome is unknown."""
        self._write(client, _AT_ONE, state.at_one)
        if state.at_zero:
            self._write(client, _AT_ZERO, state.at_zero)

    def get_group(self, clients: Sequence[str], initial: Memory) -> Memory | None:
        """The states of clients at once, [clients, ...]: `initial` for a client without one. None: get each one."""
        del clients, initial
        return None

    def put_next_group(self, clients: Sequence[str], state: NextState) -> None:
        """`put_next` of several clients. state: tensors [clients, ...]."""
        for number, client in enumerate(clients):
            self.put_next(client, mapped_next(state, operator.itemgetter(number)))

    def promote(self, counted: Iterable[tuple[str, float]]) -> None:
        """A round counted with these clients and factors: the next states that there are replace their states."""
        for client, clip_factor in counted:
            pending = self._path(client, _AT_ONE)
            if not pending.exists():
                continue
            if clip_factor != 1.0:
                at_one, at_zero = self._read(client, _AT_ONE), self._read(client, _AT_ZERO)
                self._write(client, _AT_ONE, NextState(at_one or {}, at_zero or {}).at(clip_factor))
            pending.replace(self._path(client, _STATE))
            self.changed.add(client)

    def _replace(self, client: str, memory: Memory) -> None:
        """Write a client's state to a new file."""
        self._write(client, _AT_ONE, memory)
        self._path(client, _AT_ONE).replace(self._path(client, _STATE))

    def clients(self) -> set[str]:
        """The clients that have a state."""
        return {path.name for path in (self._folder / _STATE).iterdir()}

    def path(self, client: str) -> Path:
        """The file of a client's state. It is replaced by another file, and never changed."""
        return self._path(client, _STATE)

    def put(self, client: str, file: Path) -> None:
        """Copy a client's state from a file of an earlier process. Raises OSError, and Damaged if it was changed."""
        with file.open("rb") as opened:
            client_state_store.decode(opened, 1)
        shutil.copyfile(file, self._path(client, _STATE))

    def files(self, client: str, kinds: Sequence[str]) -> list[bytes]:
        """The files of a client's state, or of its next one, for another process; empty where there is none."""
        paths = (self._path(client, kind) for kind in kinds)
        return [path.read_bytes() if path.exists() else b"" for path in paths]

    def put_files(self, client: str, kinds: Sequence[str], files: Sequence[Buffer]) -> None:
        """What `files` returned in another process."""
        for kind, data in zip(kinds, files, strict=True):
            if data:
                self._path(client, kind).write_bytes(data)

    def drop_pending(self) -> None:
        """Delete all next states that were not promoted."""
        for kind in NEXT:
            self._empty(kind)

    def remove(self, client: str) -> None:
        """Delete one client's state."""
        self._path(client, _STATE).unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Delete all clients' states."""
        self._empty(_STATE)

    def _empty(self, kind: str) -> None:
        for path in (self._folder / kind).iterdir():
            path.unlink()

    def _read(self, client: str, kind: str) -> Memory | None:
        try:
            with self._path(client, kind).open("rb") as file:
                return client_state_store.decode(file, 1)[1][0]
        except FileNotFoundError:
            return None

    def _write(self, client: str, kind: str, memory: Memory) -> None:
        with self._path(client, kind).open("wb") as file:
            file.writelines(client_state_store.encode(b"", [memory]))

    def _path(self, client: str, kind: str) -> Path:
        return self._folder / kind / file_name("a client's id", client)  # of a replayed ledger, too


def mapped(memory: Memory, function: Callable[[Tensor], Tensor]) -> Memory:
    """A client's state with `function` applied to each of its tensors."""
    return {symbol: tree.map(function, tensors) for symbol, tensors in memory.items()}


def mapped_next(state: NextState, function: Callable[[Tensor], Tensor]) -> NextState:
    """The same for a next state."""
    return NextState(mapped(state.at_one, function), mapped(state.at_zero, function))
