"""The updates of a round, as files that engines write and the round's process reads.

The files of a round are written over in the next one: in memory a new file of a few megabytes costs more than twice
the processor time of the same bytes in an existing one, because the system clears its pages.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from protos.chunks import Buffer


class Spool:
    """Updates by exchange and client. Several processes may write at the same time, each of other clients."""

    def __init__(self, folder: Path) -> None:
        self._updates, self._spare = folder / "updates", folder / "spare"
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
