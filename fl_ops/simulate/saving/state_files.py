"""The client states of a save, as files. A save writes only the states that changed since the one before it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fl_common.atomic_files import fsync_path
from fl_ops.simulate.files.states import SimulatedStates


class StateFiles:
    """The folder. A file has the name of its client and the number of the save that wrote it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self.versions: dict[str, int] = {}
        """Client -> the number in the name of its file."""

    def save(self, states: SimulatedStates, number: int) -> None:
        """Write the states that changed, durably, beside the earlier ones. Raises OSError."""
        clients = states.clients()
        for client in [each for each in clients if each in states.changed or each not in self.versions]:
            self.versions[client] = number
            _copy(states.path(client), self._path(client))
        for gone in self.versions.keys() - clients:
            del self.versions[gone]
        states.changed.clear()
        fsync_path(self._folder)

    def put_back(self, states: SimulatedStates, versions: Mapping[str, int]) -> None:
        """Restore the states of a save. Raises OSError, and memory_file.Damaged for a file that was changed."""
        self.versions = dict(versions)
        for client in versions:
            states.put(client, self._path(client))

    def remove_others(self) -> None:
        """Delete the files that the latest save does not need."""
        needed = {self._path(client).name for client in self.versions}
        for path in self._folder.iterdir():
            if path.name not in needed:
                path.unlink()

    def _path(self, client: str) -> Path:
        return self._folder / f"{self.versions[client]:06d}-{client}"


def _copy(source: Path, target: Path) -> None:
    """A second name of the file if both are on one disk: a state's file is replaced, and never changed."""
    part = target.with_name(f".{target.name}.part")
    part.unlink(missing_ok=True)
    linked = False
    with suppress(OSError):
        os.link(source, part)
        linked = True
    if not linked:
        shutil.copyfile(source, part)
    fsync_path(part)
    part.replace(target)
