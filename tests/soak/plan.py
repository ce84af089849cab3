"""What a soak is told."""

from __future__ import annotations

from dataclasses import dataclass

TASK = "tests.soak.paced_task:Paced"
STEADY = "steady"
"""The daemon that lives through the whole soak."""
GRACE_S = 5.0
"""`reattach_grace_s` of the coordinator."""


@dataclass(frozen=True)
class Plan:
    """A soak, of which the same seed makes the same choices."""

    minutes: float = 30.0
    daemons: int = 20
    """At most so many at a time."""
    seed: int = 1
    every_s: float = 15.0
    """Between two samples."""
    act_s: float = 5.0
    """Between two comings or goings: a daemon takes seconds of a core to start."""
    pause_s: float = 0.3
    """Of each training step."""
    rounds: int = 60
    """Of a short run."""
    keep: int = 2
    """`keep_checkpoints` of every run."""

    @property
    def seconds(self) -> float:
        """From the first daemon's start to the last one's leave."""
        return self.minutes * 60

    @property
    def warm_up_s(self) -> float:
        """What comes before then is no measure: caches fill, pools start their threads."""
        return min(120.0, self.seconds / 3)
