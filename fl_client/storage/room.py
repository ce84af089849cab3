"""How much of the device's disk client states may take.

What is kept for a run whose outcome is open is promised to its coordinator, so none of it is given up for another run:
work that would need more is refused. A coordinator ends runs that are over at the next registration.
"""

from __future__ import annotations

from dataclasses import dataclass

from fl_client.errors import WorkFailed
from protos.fl.v1 import coordinator_pb2 as pb


@dataclass(frozen=True, slots=True)
class Room:
    """Limits of the client states and of the updates that leave them."""

    runs: int
    """Runs that something is kept for."""
    max_bytes: int
    """In all."""
    updates: int = 8
    """Of one run; of more, the oldest go."""

    def check_runs(self, runs: int) -> None:
        """Raises WorkFailed for more than that."""
        if runs > self.runs:
            raise _full(f"client states of at most {self.runs} runs (limits.max_runs)", f"{runs}")

    def check_bytes(self, size: int) -> None:
        """Raises WorkFailed for more than that."""
        if size > self.max_bytes:
            raise _full(f"at most {self.max_bytes} bytes of client states (limits.max_kept_bytes)", f"{size}")


ROOM = Room(16, 16 << 30)
"""Where the owner said nothing."""


def _full(expected: str, came: str) -> WorkFailed:
    return WorkFailed(
        pb.FAILURE_REASON_RESOURCES,
        f"this device's owner allows {expected}, got {came}: end runs that are over, or raise the limit there",
    )
