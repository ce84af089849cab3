"""What a seed means: a job, and the faults that happen to it. A plan is a function of its seed and of nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from tests.chaos import faults
from tests.chaos.fault import Fault
from tests.chaos.jobs import JOBS, Job
from tests.chaos.points import AT_THE_END, points

Make = Callable[[Random], Fault]
LAST = {f"death {point}" for point in points(*AT_THE_END)}
MOST = 4
"""Faults of a seed."""
ROUNDS_BESIDE = 3
"""Rounds more than faults: each fault has a round that follows, whatever those before it took."""

FAMILIES: Mapping[str, Mapping[str, Make]] = {
    "deaths": faults.DEATHS,
    "processes": faults.PROCESSES,
}
FAULTS: dict[str, Make] = {name: make for family in FAMILIES.values() for name, make in family.items()}


@dataclass(frozen=True)
class Plan:
    """One run, and what happens to it: the first fault in its first round, the next in the next."""

    seed: int
    job: Job
    faults: tuple[Fault, ...]

    @property
    def takes_away(self) -> bool:
        """Whether the models may be others than those of the undisturbed run."""
        return any(fault.takes_away for fault in self.faults)

    @property
    def waits(self) -> bool:
        """Whether a round may wait as long as it takes: all who are asked will deliver."""
        return all(not fault.takes_away or getattr(fault, "waits", False) for fault in self.faults)

    @property
    def rounds(self) -> int:
        """Rounds of the run."""
        return ROUNDS_BESIDE + len(self.faults)

    def __str__(self) -> str:
        return f"{self.job.name}, {self.rounds} rounds: " + "; ".join(map(str, self.faults))


def plan(seed: int) -> Plan:
    """The plan of a seed. As many seeds in a row as there are faults have each of them once at least."""
    draw = Random(f"chaos {seed}")
    names = sorted(FAULTS)
    chosen = [names[seed % len(names)]]
    for _ in range(draw.randrange(MOST)):
        family = FAMILIES[draw.choice(sorted(FAMILIES))]
        chosen.append(draw.choice(sorted(family)))
    draw.shuffle(chosen)
    return made(seed, chosen, draw)


def made(seed: int, names: Sequence[str], draw: Random) -> Plan:
    """A plan of these faults, on a job that has what they break; what comes when the run ends comes last."""
    drawn = tuple(FAULTS[name](draw) for name in sorted(names, key=LAST.__contains__))
    possible = set(JOBS)
    for fault in drawn:
        possible &= set(getattr(fault, "jobs", JOBS))
    return Plan(seed, JOBS[draw.choice(sorted(possible))], drawn)
