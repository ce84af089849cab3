"""The state directory: who holds it, whose it is, and which part of the data is this device's for ever.

lock            held while a daemon runs; its text is the holder's process id
identity.json   the client id that the directory belongs to
shard.json      the shard as it was asked for, and the indices it came to
pending/        updates whose outcome is not known, each with the client state that it would leave
states/         client states that runs' latest rounds that counted left, one for each run
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from fl_client.errors import StateError
from fl_client.files import make_folder, write_whole

FILES = ("lock", "identity.json", "shard.json", "pending", "states")
"""Names that a daemon gives to what is in the directory."""


class StateDir:
    """A state directory, held by this process alone from `__enter__` to `__exit__`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @property
    def pending(self) -> Path:
        """Folder of the updates whose outcome is not known."""
        return self.path / "pending"

    @property
    def states(self) -> Path:
        """Folder of the client states."""
        return self.path / "states"

    def __enter__(self) -> Self:
        """Make and lock the directory. Raises StateError when that cannot be done, and says who holds it."""
        try:
            make_folder(self.path)
            lock = (self.path / "lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise StateError(f"state_dir: expected a directory that can be written, got {error}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise StateError(
                f"state_dir: {self.path} is held by another daemon, process {holder}: end that one, or give this one"
                " a directory of its own"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the next daemon in."""
        if self._lock is not None:
            self._lock.close()

    def claim(self, client_id: str) -> None:
        """Tie the directory to an identity. Raises StateError if it is another device's."""
        kept = self._kept("identity.json", lambda: {"client_id": client_id})
        if kept["client_id"] != client_id:
            raise StateError(
                f"state_dir: {self.path} belongs to client {kept['client_id']!r}, expected {client_id!r}: a state"
                " directory is one device's; give this one another"
            )

    def shard(self, asked: dict[str, Any], make: Callable[[], list[int] | None]) -> list[int] | None:
        """Indices of this device's examples, made on the first start and the same on every later one.

        Args:
            asked: task and shard as configured, in JSON's types.
            make: makes the indices, None where the shard is not made of indices.

        Raises:
            StateError: an earlier start was asked for another shard.
        """
        kept = self._kept("shard.json", lambda: {"asked": asked, "indices": make()})
        if kept["asked"] != asked:
            raise StateError(
                f"shard: {self.path / 'shard.json'} keeps {json.dumps(kept['asked'])}, the configuration now asks for"
                f" {json.dumps(asked)}: a device's shard never changes; set it back, or use another state_dir"
            )
        indices: list[int] | None = kept["indices"]
        return indices

    def _kept(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What a file keeps; made and written, whole or not at all, when there is none."""
        path = self.path / name
        made = None if path.exists() else make()
        try:
            if made is not None:
                write_whole(path, [json.dumps(made).encode()], durable=True)
            kept = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StateError(f"{path}: expected a file that this daemon wrote, got {error}") from None
        if not isinstance(kept, dict):
            raise StateError(f"{path}: expected a file that this daemon wrote, got other content")
        return kept
