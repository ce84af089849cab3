"""What this device has answered in secure aggregations, one file for each run, written before an answer leaves.

The files stay after a run's end: a coordinator that declares a run ended, and goes on with it, gets no second answer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog

from fl_client.storage.disk import made, write_whole
from fl_client.storage.state_origin import StateOrigin
from fl_common.secure_aggregation.member import Member
from protos.digests import digest_of

log = structlog.get_logger()

T = TypeVar("T")

FOLDER = "secure_aggregation"
"""The folder in the state directory."""


class Members:
    """The members of this device, by run. Blocking, one call at a time."""

    def __init__(self, folder: Path, client: str) -> None:
        """Mark all members as restored if the folder is a copy of this device's. Raises OSError, ValueError."""
        self._folder, self._client = made(folder), client
        self._loaded: dict[str, Member] = {}
        origin = StateOrigin(self._folder)
        self._was_restored = origin.was_restored
        if origin.restored:
            files = sorted(self._folder.glob("*.member"))
            for path in files:
                self._write(path, Member.from_bytes(path.read_bytes(), restored=True))
            origin.settle()
            log.warning(
                "state_restored", folder=str(self._folder), runs=len(files),
                why="the state directory is a copy: each run's next round with secure aggregation is refused",
            )  # fmt: skip

    def change(self, run: str, action: Callable[[Member], T]) -> T:
        """Do something with a run's member. Its state is on disk before this returns, or raises what the action does.

        Raises OSError if it cannot be written: then nothing has changed. ValueError: the file is damaged.
        """
        path = self._folder / f"{digest_of(run.encode()).hex()[:32]}.member"
        member = self._loaded.get(run) or self._read(path, run)
        before = member.to_bytes()
        try:
            return action(member)
        finally:
            self._loaded.pop(run, None)
            if member.to_bytes() != before:
                self._write(path, member)
            self._loaded[run] = member

    def _read(self, path: Path, run: str) -> Member:
        try:
            return Member.from_bytes(path.read_bytes())
        except FileNotFoundError:
            return Member(self._client, run, restored=self._was_restored)

    @staticmethod
    def _write(path: Path, member: Member) -> None:
        write_whole(path, [member.to_bytes()], durable=True)
