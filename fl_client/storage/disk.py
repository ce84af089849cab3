"""The disk: files that are written whole or not at all, its one thread, and the limits of client states on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from fl_client.errors import WorkFailed, beyond_limits
from fl_common.files import atomic_writer, fsync_path, make_folders
from fl_common.units import counted
from protos.chunks import Buffer

PART = ".part"
"""Suffix of a file that is being written."""


def write_whole(path: Path, buffers: Iterable[Buffer], *, durable: bool = False, over: Path | None = None) -> None:
    """Write the buffers, one after the other, in place of the file at the path.

    Args:
        path: of the file. If the disk cannot take the new one, the old one stays.
        buffers: the content.
        durable: whether the file survives a power cut; it survives the death of the process in any case.
        over: a file that is no longer needed, and may be missing. Its blocks are overwritten, which takes the kernel a
            fraction of the time that a new file takes.

    Raises:
        OSError: the disk cannot take the file.
    """
    part = path.with_suffix(PART)
    if over is not None:
        with suppress(FileNotFoundError):
            over.replace(part)
    with atomic_writer(path, part=part, durable=durable) as file:
        file.writelines(buffers)


def make_folder(folder: Path) -> None:
    """Make a missing folder and its missing parents; the names survive a power cut."""
    existed = folder.exists()
    make_folders(folder, durable=True)
    if existed:  # an earlier process may have been killed just after it made the folder
        with suppress(PermissionError):
            fsync_path(folder.parent)


def made(folder: Path) -> Path:
    """A folder of the state directory, made if it is missing, without files that a killed process left half-written.

    From now on its names survive a power cut: the killed process may not have synced them.
    """
    make_folder(folder)
    for torn in folder.glob(f"*{PART}"):
        torn.unlink()
    fsync_path(folder)
    return folder


P = ParamSpec("P")
T = TypeVar("T")


class DiskThread:
    """Runs functions one after the other, in the order of the calls, so that the event loop never waits for a disk."""

    def __init__(self, threads: Callable[[int, str], Executor] = ThreadPoolExecutor) -> None:
        """threads: makes a pool of so many threads with that name."""
        self._executor = threads(1, "disk")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))

    async def close(self) -> None:
        """Accept no more calls, and wait until all earlier ones are done."""
        await asyncio.to_thread(self._executor.shutdown)


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """Limits of the client states and of the updates that have a next client state.

    Files of a run with an open outcome are promised to its coordinator, so none of them is removed for another run:
    work that needs more is refused. A coordinator reports ended runs when the daemon comes back.
    """

    runs: int
    """Runs with files."""
    max_bytes: int
    """Bytes of all runs together."""
    updates: int = 8
    """Updates of one run. Beyond it the oldest are removed."""

    def check_runs(self, runs: int) -> None:
        """Raises WorkFailed for too many runs."""
        if runs > self.runs:
            raise _over_limit(f"client states of at most {counted(self.runs, 'run')} (limits.max_runs)", f"{runs}")

    def check_bytes(self, size: int) -> None:
        """Raises WorkFailed for too many bytes."""
        if size > self.max_bytes:
            raise _over_limit(f"at most {self.max_bytes} bytes of client states (limits.max_kept_bytes)", f"{size}")


DEFAULT_LIMITS = StorageLimits(16, 16 << 30)
"""The defaults of LimitsConfig."""


def _over_limit(allowed: str, needed: str) -> WorkFailed:
    return beyond_limits(
        f"this device's owner allows {allowed}, got {needed}: end runs that are over, or raise the limit there"
    )
