"""The files of a save: the results of committed rounds, the client states, and what must be equal to continue.

A save writes only what is new since the one before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from blake3 import blake3

import algorithms
import fl_client
import fl_extensions
import fl_server
import fl_tasks
import protos
from fl_common.files import fsync_path
from fl_ops import simulate
from fl_ops.errors import Refused
from fl_ops.simulate.reports import RoundResult
from fl_ops.simulate.run_files import SimulatedStates

_PARTS = (algorithms, fl_client, fl_extensions, fl_server, fl_tasks, protos, simulate)


@cache
def program_digest() -> str:
    """SHA-256 over the text of this program's modules that take part in a simulation."""
    whole = hashlib.sha256()
    for part in _PARTS:
        root = Path(part.__path__[0])
        for path in sorted(root.rglob("*.py")):
            whole.update(f"{part.__name__}/{path.relative_to(root)}\n".encode())
            whole.update(hashlib.sha256(path.read_bytes()).digest())
    return f"sha256:{whole.hexdigest()}"


def differences(saved: Any, now: Any, name: str = "") -> Iterator[str]:
    """A text for each value that differs, with its dotted name. saved, now: JSON values."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*saved, *now]):
            yield from differences(saved.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif saved != now:
        yield f"{name} was {saved!r} and is {now!r}"


class History:
    """The file. Its first `bytes` bytes, with their digest, belong to the save that names them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._digest = blake3()
        self.count = 0
        """Number of rounds in the file."""

    def append(self, rounds: Sequence[RoundResult]) -> None:
        """Write more rounds, durably. Raises OSError."""
        text = "".join(json.dumps(each.as_json()) + "\n" for each in rounds).encode()
        with self._path.open("r+b" if self._path.exists() else "xb") as file:
            file.truncate(self._size)
            file.seek(self._size)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self._size += len(text)
        self._digest.update(text)
        self.count += len(rounds)

    @property
    def facts(self) -> dict[str, Any]:
        """What the file has now, as JSON values."""
        return {"bytes": self._size, "digest": self._digest.hexdigest(), "rounds": self.count}

    def read(self, facts: Mapping[str, Any]) -> list[RoundResult]:
        """The rounds of a save. Later lines are cut by the next `append`. Raises OSError, and Refused if damaged."""
        with self._path.open("rb") as file:
            text = file.read(facts["bytes"])
        self._size, self._digest, self.count = len(text), blake3(text), facts["rounds"]
        if self.facts != dict(facts):
            raise Refused(f"{self._path} was changed or cut: remove the folder to simulate again from the beginning")
        return [_round(json.loads(line)) for line in text.splitlines()]


def _round(values: dict[str, Any]) -> RoundResult:
    lists = {name: tuple(values.get(name, ())) for name in ("accepted", "local_epochs", "versions")}
    return RoundResult(**{**values, **lists})


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
