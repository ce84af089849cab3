"""Parameters of a soak."""

from __future__ import annotations

from dataclasses import dataclass

TASK = "tests.soak.paced_task:Paced"
STEADY = "steady"
"""Id of the daemon that runs through the whole soak."""
GRACE_S = 5.0
"""`reattach_grace_s` of the coordinator."""


@dataclass(frozen=True)
class Plan:
    """The parameters of a soak. The same seed makes the same choices."""

    minutes: float = 30.0
    daemons: int = 20
    """Largest number at a time."""
    seed: int = 1
    every_s: float = 15.0
    """Seconds between two samples."""
    act_s: float = 5.0
    """Seconds between two starts or stops: the start of a daemon takes seconds of a core."""
    pause_s: float = 0.3
    """Seconds of pause in each training step."""
    rounds: int = 60
    """Rounds of a short run."""
    keep: int = 2
    """`keep_checkpoints` of every run."""

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first daemon to the stop of all."""
        return self.minutes * 60

    @property
    def warm_up_s(self) -> float:
        """Samples before this time do not count: caches fill, pools start their threads."""
        return min(120.0, self.seconds / 3)
