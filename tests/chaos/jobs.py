"""The small runs of the chaos tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.processes.federation import TASK

LONGEST = 7
"""Rounds of the longest run."""
POPULATION = 5
"""The daemons and one client that sends invalid updates."""
SHORT_S = 5.0
"""Deadline of a round that may have to continue without a client."""
MAX_STALENESS = 3
"""With a buffer: a version is in use for so many rounds at most."""
LONGEST_UPDATE = 1e6
"""A norm that no valid update reaches."""


@dataclass(frozen=True, slots=True)
class Job:
    """One kind of run."""

    name: str
    algorithm: Mapping[str, Any]
    close: str = "cohort"

    @property
    def repeatable(self) -> bool:
        """Whether an undisturbed run always has the same models, because each round waits for its whole cohort."""
        return self.close == "cohort"

    @property
    def buffered(self) -> bool:
        """Whether clients work on over commits."""
        return self.close == "buffer"

    @property
    def keeps_states(self) -> bool:
        """Whether clients keep states and the coordinator keeps their mean."""
        return bool(self.algorithm["name"] == "scaffold")

    def with_sections(self, rounds: int = LONGEST, *, waits: bool = True) -> dict[str, Any]:
        """The run's sections. A run that does not wait continues without late clients."""
        size: dict[str, Any] = {"clients_per_round": 3}
        if self.buffered:
            size = {"goal": 3, "concurrency": 3, "max_staleness": MAX_STALENESS}
        return {
            "task": {"name": TASK, "options": {"model": "broad"}},
            "algorithm": self.algorithm,
            "round": {
                **size,
                "min_clients": 4 if waits else 3,
                "close": self.close,
                "deadline_s": 600.0 if waits else SHORT_S,
                "max_update_norm": LONGEST_UPDATE,
            },
            "stop": {"rounds": rounds},
            "population": POPULATION if self.keeps_states else 0,
        }


JOBS = {
    job.name: job
    for job in (
        Job("fedcm", {"name": "fedcm", "parameters": {"alpha": 0.2}}),
        Job("scaffold", {"name": "scaffold"}),
        Job("fedcm-goal", {"name": "fedcm", "parameters": {"alpha": 0.2}}, close="goal"),
        Job("fedcm-buffer", {"name": "fedcm", "parameters": {"alpha": 0.2}}, close="buffer"),
    )
}
