"""What a fault is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tests.chaos.arena import Arena


class DidNotHappen(Exception):
    """The fault found nothing to break, and says why: it is not counted."""


class Fault(Protocol):
    """One thing that goes wrong, with all its parameters drawn."""

    @property
    def name(self) -> str:
        """What it is counted under."""
        ...

    @property
    def takes_away(self) -> bool:
        """Whether it may take an update away, so that the model may be another than that of the undisturbed run."""
        ...

    def inject(self, arena: Arena, run_id: str) -> None:
        """Let it happen in the round under way; returns once it has, and what must be healed is healed."""
        ...
