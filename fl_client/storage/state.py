"""The state directory: its lock, the identity that owns it, and the shard of the data that never changes.

lock            held while a daemon runs; contains the holder's process id
identity.json   the client id that the directory belongs to
shard.json      the shard as it was configured, and its indices
packages/       packages of task code, what the owner decided of them, and their modules
shards/         the same for each of several tasks
data/           for each name of data, as the two files of the privacy account that it has instead of the one here
pending/        updates with an unknown outcome, each with its next client state
tls/            certificate and key that the coordinator issued, if `fl-client init` got them with a token
states/         client states after the latest round that counted, one for each run
usage.json      the day's work, where a policy limits it
secure_aggregation/  what was answered in secure aggregations, one file for each run
privacy.json    the secret of the data's noise, and what all runs with privacy have spent
privacy-charges.json  the number of its charges, by which an older copy of it is known
releases/       released models, unless the settings name another folder
audit.jsonl     what the daemon was asked to do and did; audit.1.jsonl and so on are older
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from fl_client.errors import StateError
from fl_client.storage.disk import made, make_folder, write_whole
from fl_common.files import FileLock, FileLocked
from fl_common.settings import parse_json

AUDIT = ("audit.jsonl", *(f"audit.{number}.jsonl" for number in range(1, 5)))
"""Files of the audit log, the newest first."""
RELEASES, SHARDS = "releases", "shards"
FILES = (
    "lock", "identity.json", "shard.json", SHARDS, "data", "packages", "pending", "states", "tls", "usage.json",
    "privacy.json", "privacy-charges.json", "secure_aggregation", RELEASES, *AUDIT,
)  # fmt: skip
"""Names of the files and folders in the directory."""


class StateDir:
    """A state directory, locked by this process from `__enter__` to `__exit__`."""

    def __init__(self, path: Path) -> None:
        self.path, self.pending, self.states = path, path / "pending", path / "states"
        """The directory, and the folders of updates with an unknown outcome and of client states."""
        self._lock: FileLock | None = None
        self._contents: dict[str, bytes] = {}
        """Contents of the files that never change, by name."""

    def __enter__(self) -> Self:
        """Make and lock the directory. Raises StateError, which names the holder of the lock, if that fails."""
        try:
            make_folder(self.path)
            self._lock = self._locked()
        except OSError as error:
            raise StateError(f"state_dir: expected a directory that can be written, got {error}") from None
        return self

    def _locked(self) -> FileLock:
        """Raises StateError, OSError."""
        try:
            return FileLock(self.path / "lock", f"{os.getpid()}\n")
        except FileLocked as locked:
            raise StateError(
                f"state_dir: {self.path} is held by another daemon, process {locked.holder.strip() or 'unknown'}: end"
                " that one, or give this one a directory of its own"
            ) from None

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()

    # While the daemon runs.

    def is_whole(self) -> bool:
        """Whether lock, files and folders are those of this process. Raises OSError where this cannot be seen."""
        return (
            self._lock is not None
            and self._lock.is_at(self.path / "lock")
            and all((self.path / name).exists() for name in self._contents)
            and all(folder.is_dir() for folder in (self.pending, self.states))
        )

    def make_again(self) -> None:
        """Make what has vanished: the directory, its lock, its files with their old contents, and empty folders.

        Raises:
            OSError: the directory cannot be made.
            StateError: another daemon or another device has it now.
        """
        make_folder(self.path)
        if self._lock is None or not self._lock.is_at(self.path / "lock"):
            lost, self._lock = self._lock, self._locked()
            if lost is not None:
                lost.release()
        for name, content in self._contents.items():
            path = self.path / name
            if not path.exists():
                make_folder(path.parent)
                write_whole(path, [content], durable=True)
            elif path.read_bytes() != content:
                raise StateError(f"{path}: expected its content at this daemon's start, got another device or shard")
        for folder in (self.pending, self.states):
            if not folder.is_dir():
                made(folder)

    # At the start.

    def claim(self, client_id: str) -> None:
        """Bind the directory to an identity. Raises StateError if it belongs to another device."""
        kept = self._kept("identity.json", lambda: {"client_id": client_id})
        if kept["client_id"] != client_id:
            raise StateError(
                f"state_dir: {self.path} belongs to client {kept['client_id']!r}, expected {client_id!r}: a state"
                " directory belongs to one device; use another one here"
            )

    def claim_data(self, data: str) -> None:
        """Write that data of this name is used, after its account is made. Raises StateError."""
        if data:
            self._kept(f"data/{data}.json", lambda: {"data": data})

    def shard(
        self, configured: dict[str, Any], make: Callable[[], list[int] | None], title: str = ""
    ) -> list[int] | None:
        """Indices of this device's examples, made on the first start and the same on every later one.

        Args:
            configured: task and shard, in JSON's types.
            make: returns the indices, or None where the shard has none.
            title: of one of several tasks.

        Raises:
            StateError: an earlier start had another shard configured.
        """
        name = shard_file(title)
        kept = self._kept(name, lambda: {"asked": configured, "indices": make()})
        if kept["asked"] != configured:
            raise StateError(
                f"shard: {self.path / name} has {json.dumps(kept['asked'])}, the configuration has"
                f" {json.dumps(configured)}: a device's shard never changes; set it back, or use another state_dir"
            )
        indices: list[int] | None = kept["indices"]
        return indices

    def _kept(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The content of a file, which is made and written atomically if there is none."""
        path = self.path / name
        made = None if path.exists() else make()
        try:
            if made is not None:
                make_folder(path.parent)
                write_whole(path, [json.dumps(made).encode()], durable=True)
            content = path.read_bytes()
            kept = parse_json(content)
        except (OSError, ValueError) as error:
            raise StateError(f"{path}: expected a file that this daemon wrote, got other content: {error}") from None
        if not isinstance(kept, dict):
            raise StateError(f"{path}: expected a JSON object that this daemon wrote, got other content")
        self._contents[name] = content
        return kept


def shard_file(title: str) -> str:
    """Name of the file of a shard. title: of one of several tasks."""
    return f"shards/{quote(title, safe='@')}.json" if title else "shard.json"


_PROBE_BYTES = 64 << 10
"""Bytes that are written to test a directory."""


def examine(state: StateDir, need_bytes: int | None = None) -> tuple[bool, str | None]:
    """Make the directory again where it is not whole, and find out whether it can be used. Blocking.

    Returns whether something had vanished and was made again, and why the directory cannot be used; None if it can.
    need_bytes: bytes that must be free. The directory is then tested by a write too; None: by its rights alone, because
    a write every few seconds wears out a memory card.
    """
    made_again = False
    try:
        if not state.is_whole():
            state.make_again()
            made_again = True
        if need_bytes is not None or not os.access(state.path, os.W_OK | os.X_OK):
            check_writable(state.path, need_bytes or 0)
    except (OSError, StateError) as error:
        return made_again, str(error)
    return made_again, None


def check_writable(folder: Path, need_bytes: int = 0) -> None:
    """Raise OSError if a durable write fails, or if a file of `need_bytes` has no room, also because of a quota."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        try:
            os.posix_fallocate(file.fileno(), 0, _PROBE_BYTES + need_bytes)
        except OSError as error:
            raise OSError(error.errno, f"no room for {need_bytes} bytes: {error.strerror}", str(folder)) from None
