"""Examines the state directory while the daemon runs: makes what has vanished again, and names other problems."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fl_client.errors import StateError
from fl_client.storage.state import StateDir

_PROBE_BYTES = 64 << 10
"""Bytes that are written to test a directory."""


@dataclass(frozen=True, slots=True)
class Examination:
    """The result of one look at the directory."""

    made_again: bool
    """Whether something had vanished and was made again."""
    problem: str | None = None
    """Why the directory cannot be used. None if it can."""


def examine(state: StateDir, need_bytes: int | None = None) -> Examination:
    """Make the directory again where it is not whole, and find out whether it can be used. Blocking.

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
        return Examination(made_again, str(error))
    return Examination(made_again)


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
