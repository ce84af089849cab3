"""The plan of a seed: a job and its faults. A plan depends only on its seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from tests.chaos import bad_updates, faults, wire_faults
from tests.chaos.fault import Fault
from tests.chaos.jobs import JOBS, Job
from tests.chaos.points import AT_THE_END, points

FaultFactory = Callable[[Random], Fault]
LAST = {f"death {point}" for point in points(*AT_THE_END)}
MAX_FAULTS = 4
"""Largest number of faults in a seed."""
EXTRA_ROUNDS = 3
"""Rounds in addition to one for each fault, so that each fault has a round that follows."""

FAMILIES: Mapping[str, Mapping[str, FaultFactory]] = {
    "deaths": faults.DEATHS,
    "processes": faults.PROCESSES,
    "wire": wire_faults.FAULTS,
    "updates": bad_updates.FAULTS,
}
FAULTS: dict[str, FaultFactory] = {name: make for family in FAMILIES.values() for name, make in family.items()}


@dataclass(frozen=True)
class Plan:
    """One run and its faults: the first fault in the first round, the second in the second."""

    seed: int
    job: Job
    faults: tuple[Fault, ...]

    @property
    def may_lose_update(self) -> bool:
        """Whether the models may differ from those of the undisturbed run."""
        return any(fault.may_lose_update for fault in self.faults)

    @property
    def waits(self) -> bool:
        """Whether a round may wait without limit, because every client of the cohort will deliver."""
        return all(not fault.may_lose_update or getattr(fault, "waits", False) for fault in self.faults)

    @property
    def rounds(self) -> int:
        """Number of rounds of the run."""
        return EXTRA_ROUNDS + len(self.faults)

    def __str__(self) -> str:
        return f"{self.job.name}, {self.rounds} rounds: " + "; ".join(map(str, self.faults))


def plan(seed: int, job: str = "") -> Plan:
    """The plan of a seed. N consecutive seeds contain each of the N faults at least once.

    job: the only job, with all faults that it can have; empty: any.
    """
    draw = Random(f"chaos {seed} {job}".strip())
    names = sorted(name for name in FAULTS if not job or job in getattr(FAULTS[name](draw), "jobs", JOBS))
    chosen = [names[seed % len(names)]]
    for _ in range(draw.randrange(MAX_FAULTS)):
        family = FAMILIES[draw.choice(sorted(FAMILIES))]
        chosen.append(draw.choice(sorted(set(names) & family.keys())))
    draw.shuffle(chosen)
    return plan_with(seed, chosen, draw, job)


def plan_with(seed: int, names: Sequence[str], draw: Random, job: str = "") -> Plan:
    """A plan of these faults on a job that they can break. A fault at the end of the run comes last."""
    drawn = tuple(FAULTS[name](draw) for name in sorted(names, key=LAST.__contains__))
    possible = {job} if job else set(JOBS)
    for fault in drawn:
        possible &= set(getattr(fault, "jobs", JOBS))
    return Plan(seed, JOBS[draw.choice(sorted(possible))], drawn)
