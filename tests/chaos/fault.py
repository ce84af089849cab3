"""The interface of a fault."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tests.chaos.cluster import ChaosCluster


class DidNotHappen(Exception):
    """The fault found nothing to break, for the given reason. It is not counted."""


class Fault(Protocol):
    """One fault with all its parameters."""

    @property
    def name(self) -> str:
        """The name under which it is counted."""
        ...

    @property
    def may_lose_update(self) -> bool:
        """Whether an update may be lost, so that the model may differ from that of the undisturbed run."""
        ...

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        """Cause the fault in the current round and undo what has to be undone."""
        ...
