"""How many neighbours a client shares masks with, and how many shares open a secret.

Up to 20 clients, all are neighbours. Above, k neighbours are enough, k / 2 on each side of a circle in random order. k
is the smallest even number for which each of these has a probability of at most 2^-40 over the whole cohort, with
c = max_corrupt n clients that help the coordinator, t shares of k + 1 holders (a client holds one of its own) and the
clients at random places:

  secrecy       t of a client's neighbours are corrupt, and open what must stay closed.
  connection    a gap of k / 2 clients has t - k / 2 - 1 corrupt ones. An honest client at a gap that has fewer keeps
                less than t holders of its mask. So the coordinator cannot divide the circle by dropping clients of its
                choice, and get the sum of a part.
  drop-outs     max_dropped n clients are gone, and t holders of a secret are not left.

(Bell et al. 2020, section 3, with the conditions of a coordinator that lies about drop-outs.) t is over two thirds of
the holders. On one survivor list the signatures of more than two thirds of all members are needed: two lists would
need a third of the members to sign both, and only corrupt ones do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from fl_common.secure_aggregation.errors import PlanError
from fl_common.secure_aggregation.terms import Settings

ALL_NEIGHBOURS = 20
"""The most clients that are all neighbours of each other."""
_FAILURE = 2.0**-40


@dataclass(frozen=True, slots=True)
class Plan:
    """The numbers of one secure aggregation."""

    members: int
    """n: the clients whose keys arrived."""
    neighbours: int
    """k."""
    threshold: int
    """t: the shares that open a secret, of k + 1."""
    quorum: int
    """The signatures on one survivor list that clients ask for, and the fewest clients that may be left in a stage."""
    fewest: int
    """The fewest survivors."""

    @property
    def full(self) -> bool:
        """Whether all members are neighbours."""
        return self.neighbours == self.members - 1


@lru_cache(maxsize=64)
def plan_of(settings: Settings, members: int) -> Plan:
    """The plan for so many members. Raises PlanError if there are too few."""
    if members < settings.min_clients:
        raise PlanError(f"min_clients: expected at least {settings.min_clients} clients, got {members}")
    quorum = _over_two_thirds(members)
    fewest = max(settings.min_clients, quorum)
    corrupt, dropped = (int(share * members) for share in (settings.max_corrupt, settings.max_dropped))
    if members > ALL_NEIGHBOURS:
        for neighbours in range(2, members - 1, 2):
            threshold = _threshold(members, neighbours, corrupt)
            if threshold and members * _tail(members - 1, dropped, neighbours, neighbours - threshold + 1) <= _FAILURE:
                return Plan(members, neighbours, threshold, quorum, fewest)
    return Plan(members, members - 1, max(quorum, corrupt + 1), quorum, fewest)


def _over_two_thirds(count: int) -> int:
    return 2 * count // 3 + 1


def _threshold(members: int, neighbours: int, corrupt: int) -> int:
    """The smallest t that is secret and connected; 0 if there is none."""
    half = neighbours // 2
    for threshold in range(_over_two_thirds(neighbours + 1), neighbours + 1):
        secret = _tail(members - 1, corrupt, neighbours, threshold)
        connected = _tail(members - 1, corrupt, half, threshold - half - 1)
        if members * max(secret, connected) <= _FAILURE:
            return threshold
    return 0


def _tail(population: int, marked: int, drawn: int, least: int) -> float:
    """The probability that at least `least` of the drawn ones are marked: hypergeometric."""
    if least <= 0:
        return 1.0
    whole = _log_choose(population, drawn)
    terms = (
        _log_choose(marked, count) + _log_choose(population - marked, drawn - count) - whole
        for count in range(max(least, drawn - (population - marked)), min(marked, drawn) + 1)
    )
    return math.fsum(map(math.exp, terms))


def _log_choose(count: int, chosen: int) -> float:
    return math.lgamma(count + 1) - math.lgamma(chosen + 1) - math.lgamma(count - chosen + 1)
