"""The results of committed rounds in a file: one line of JSON for each, appended, so that a save costs what is new."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blake3 import blake3

from fl_ops.errors import Refused
from fl_ops.simulate.reports import RoundResult


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
        text = "".join(json.dumps(asdict(each)) + "\n" for each in rounds).encode()
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
    accepted, epochs = tuple(values["accepted"]), tuple(values["local_epochs"])
    return RoundResult(**{**values, "accepted": accepted, "local_epochs": epochs})
