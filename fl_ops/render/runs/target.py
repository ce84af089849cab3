"""The rounds, bytes and time that a run needed to reach a target."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from fl_common import units
from fl_ops.render.runs.criterion import criterion_of
from fl_server.rounds.stop_rules import Reached, rounds_to_target
from protos.fl.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class TargetCost:
    """A target, and the cost of reaching it; None if no round reached it."""

    metric: str
    target: float
    reached: Reached | None

    @classmethod
    def of(cls, response: admin_pb2.GetRunResponse, target: float | None) -> Self | None:
        """The cost of this target, or of the run's own; None without a target."""
        stop = response.run.spec.stop
        if target is None and not stop.HasField("target"):
            return None
        criterion, wanted = criterion_of(stop), stop.target if target is None else target
        return cls(criterion.metric, wanted, rounds_to_target(criterion, wanted, response.rounds))

    def text(self) -> str:
        """For example: accuracy 0.8 after 13 rounds, 43 MiB down, 43 MiB up, 3 min 05 s."""
        if self.reached is None:
            return f"{self.metric} {self.target:g} is not reached"
        count = self.reached.round + 1
        return (
            f"{self.metric} {self.target:g} after {count} round{'s' if count > 1 else ''}, "
            f"{units.size(self.reached.bytes_down)} down, {units.size(self.reached.bytes_up)} up, "
            f"{units.duration(self.reached.seconds)}"
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `reached` is null if no round reached the target."""
        return asdict(self)
