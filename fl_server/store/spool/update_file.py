"""Reads a whole update. Plain reads into the caller's memory: a mapped file would count as resident memory."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from fl_server.store.errors import StoreError
from fl_server.store.files import disk_errors


class UpdateFile:
    """A whole update, open for reading."""

    def __init__(self, path: Path) -> None:
        with disk_errors(f"open the update {path}"):
            self._file = os.open(path, os.O_RDONLY)
            self.size_bytes = os.fstat(self._file).st_size
        self.path = path

    def read_into(self, offset: int, buffer: bytearray | memoryview) -> None:
        """Fill a buffer from `offset`, without a copy between. Raises StoreError if the file is shorter."""
        view = memoryview(buffer).cast("B")
        with disk_errors(f"read the update {self.path}"):
            while view:
                count = os.preadv(self._file, [view], offset)
                if not count:
                    raise StoreError(f"the update {self.path} ends at {offset}, {len(view)} bytes short: it is torn")
                view, offset = view[count:], offset + count

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
