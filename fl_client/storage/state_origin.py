"""Whether the state directory is the one that this device wrote, or a copy of it: an old backup that was restored.

A device must not forget what it has answered in a secure aggregation. A file that is made once has an inode and a time
of its last change that no copy has, and a second file states them. Not noticed is what brings a disk back as a whole: a
snapshot of a volume or of a virtual machine. Changes of owner or mode look like a copy, which costs one round.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from fl_common.files import atomic_writer, make_folders

_MADE_ONCE, _STATED = "origin", "origin.json"


class StateOrigin:
    """The two files in a folder of the state directory. Blocking."""

    def __init__(self, folder: Path) -> None:
        """Make the files in a new folder. Raises OSError."""
        self._folder = folder
        make_folders(folder, durable=True)
        stated = self._stated()
        self.restored = stated is not None and stated.get("origin") != self._found()
        """Whether the folder is a copy. It stays so until `settle`."""
        self.was_restored = self.restored or bool(stated and stated.get("was_restored"))
        """Whether it has ever been one: what was answered in runs without a file here is then unknown."""
        if stated is None:
            self.settle()

    def settle(self) -> None:
        """Make this folder the original one, after every state in it has been marked as restored. Raises OSError."""
        with atomic_writer(self._folder / _MADE_ONCE) as file:
            file.write(os.urandom(16))
        with atomic_writer(self._folder / _STATED) as file:
            file.write(json.dumps({"origin": self._found(), "was_restored": self.was_restored}).encode())
        self.restored = False

    def _stated(self) -> dict[str, object] | None:
        """The contents of the second file; None in a new folder, and empty ones if they cannot be used.

        A folder with the first file alone is new, too: its daemon was killed while it made the files, before it had
        answered anything.
        """
        try:
            raw = (self._folder / _STATED).read_bytes()
        except FileNotFoundError:
            others = [
                path for path in self._folder.iterdir() if not path.name.startswith((_MADE_ONCE, f".{_MADE_ONCE}"))
            ]
            return {} if others else None
        try:
            stated = json.loads(raw)
        except ValueError:
            return {}
        return stated if isinstance(stated, dict) else {}

    def _found(self) -> list[int] | None:
        """Inode and time of the last change of the first file, in nanoseconds; None without it."""
        try:
            status = (self._folder / _MADE_ONCE).stat()
        except FileNotFoundError:
            return None
        return [status.st_ino, status.st_ctime_ns]
