"""What it took a run to reach a target, in words and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from fl_ops import units
from fl_server.target import Reached, rounds_to_target
from protos.fl.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class Reaching:
    """A target, and what it took."""

    metric: str
    target: float
    reached: Reached | None

    @classmethod
    def of(cls, answer: admin_pb2.GetRunResponse, target: float | None) -> Self | None:
        """For this target, or else the run's own; None without one."""
        stop = answer.run.spec.stop
        if target is None and not stop.HasField("target"):
            return None
        metric, wanted = stop.metric or "accuracy", stop.target if target is None else target
        return cls(metric, wanted, rounds_to_target(metric, wanted, answer.rounds))

    def words(self) -> str:
        """For a table: accuracy 0.8 after 13 rounds, 43 MiB down, 43 MiB up, 3 min 05 s."""
        if self.reached is None:
            return f"{self.metric} {self.target:g} is not reached"
        count = self.reached.round + 1
        return (
            f"{self.metric} {self.target:g} after {count} round{'s' if count > 1 else ''}, "
            f"{units.size(self.reached.bytes_down)} down, {units.size(self.reached.bytes_up)} up, "
            f"{units.duration(self.reached.seconds)}"
        )

    def to_json(self) -> dict[str, Any]:
        """For programs: `reached` is null if no round reached it."""
        return asdict(self)
