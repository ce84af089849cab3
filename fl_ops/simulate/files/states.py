"""Client states of a simulated run, as files: SCAFFOLD's c_i, FedDyn's h_i, personal parameters.

Processes that train clients write next states; the one that decides what counts promotes or drops them. The files are
in memory or on disk, so the number of clients does not bound the memory of the processes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from algorithms.base import Memory
from fl_client.storage import client_state_store
from fl_client.storage.client_state_store import NextState
from fl_ops.files import file_name

_STATE, _AT_ONE, _AT_ZERO = "state", "next/at-one", "next/at-zero"


class SimulatedStates:
    """The clients' states in a folder. Several processes may use one folder, if each client is in one at a time."""

    def __init__(self, folder: Path) -> None:
        for kind in (_STATE, _AT_ONE, _AT_ZERO):
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

    def promote(self, client: str, clip_factor: float) -> None:
        """The round counted with this factor: its next state, if there is one, replaces the client's state."""
        pending = self._path(client, _AT_ONE)
        if not pending.exists():
            return
        if clip_factor != 1.0:
            at_one, at_zero = self._read(client, _AT_ONE), self._read(client, _AT_ZERO)
            self._write(client, _AT_ONE, NextState(at_one or {}, at_zero or {}).at(clip_factor))
        pending.replace(self._path(client, _STATE))
        self.changed.add(client)

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

    def stored(self, client: str) -> bytes:
        """The file of a client's state, for another process; empty if there is none."""
        return self._bytes(client, _STATE)

    def store(self, client: str, data: bytes | bytearray) -> None:
        """What `stored` returned in another process."""
        self._store(client, _STATE, data)

    def taken_next(self, client: str) -> tuple[bytes, bytes]:
        """The files of a client's next state, for another process. They are removed here."""
        at_one, at_zero = (self._bytes(client, kind) for kind in (_AT_ONE, _AT_ZERO))
        for kind in (_AT_ONE, _AT_ZERO):
            self._path(client, kind).unlink(missing_ok=True)
        return at_one, at_zero

    def store_next(self, client: str, at_one: bytes | bytearray, at_zero: bytes | bytearray) -> None:
        """What `taken_next` returned in another process."""
        self._store(client, _AT_ONE, at_one)
        self._store(client, _AT_ZERO, at_zero)

    def drop_pending(self) -> None:
        """Delete all next states that were not promoted."""
        for kind in (_AT_ONE, _AT_ZERO):
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

    def _bytes(self, client: str, kind: str) -> bytes:
        path = self._path(client, kind)
        return path.read_bytes() if path.exists() else b""

    def _store(self, client: str, kind: str, data: bytes | bytearray) -> None:
        if data:
            self._path(client, kind).write_bytes(data)

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
