"""Who takes part: cohorts and seeds as pure functions, so that a restart draws what was drawn before.

Every client gets a ticket, a 64-bit hash of (seed, round, attempt, id). A fixed-size cohort is the clients with the
lowest tickets; a Bernoulli cohort is those whose ticket is below rate * 2^64. Neither depends on the order of the
clients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

_TICKETS = 1 << 64
_REDRAWS = 100
"""Empty Bernoulli cohorts in a row after which one client is drawn: a tiny rate must not hold the coordinator up."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Which drawing of a run this is."""

    seed: int
    round: int
    attempt: int


def by_id(clients: Iterable[str]) -> tuple[str, ...]:
    """Clients in the order of their id bytes: the order of every list and every sum."""
    return tuple(sorted(clients, key=str.encode))


def ticket(kind: str, *parts: object) -> int:
    """A 64-bit hash of the parts, uniform over [0, 2^64)."""
    text = "\x1f".join((kind, *map(str, parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def draw_fixed(pool: Iterable[str], size: int, draw: Draw) -> tuple[str, ...]:
    """`size` clients of the pool, uniformly without replacement; the whole pool if it is smaller (ALGORITHMS 7.2)."""
    ranked = sorted(pool, key=lambda client: (ticket("fixed", draw.seed, draw.round, draw.attempt, client), client))
    return by_id(ranked[:size])


def draw_bernoulli(pool: Iterable[str], rate: float, draw: Draw) -> tuple[str, ...]:
    """Each client with probability `rate`, independently; an empty cohort is drawn again (ALGORITHMS 7.2, A24).

    Empty only if the pool is.
    """
    clients = by_id(pool)
    threshold = int(rate * _TICKETS)
    if threshold <= 0:
        raise ValueError(f"expected a rate over 0, got {rate}")
    for redraw in range(_REDRAWS):
        parts = (draw.seed, draw.round, draw.attempt, redraw)
        cohort = tuple(client for client in clients if ticket("bernoulli", *parts, client) < threshold)
        if cohort:
            return cohort
    # What is left is a rate so small that a cohort that is not empty has one client, each with the same probability.
    return draw_fixed(clients, 1, draw)


def draw_evaluators(pool: Iterable[str], size: int, seed: int, round: int) -> tuple[str, ...]:
    """`size` clients of the pool to evaluate a committed round, all with 0: apart from who trains in which round."""
    ranked = sorted(pool, key=lambda client: (ticket("evaluation", seed, round, client), client))
    return by_id(ranked[:size] if size else ranked)


def training_seed(seed: int, round: int, client: str) -> int:
    """Seed of a client's batch order, augmentation and dropout: never of the attempt, the process or the time."""
    return ticket("training", seed, round, client)


def initial_model_seed(seed: int) -> int:
    """Seed of the first model's random values, in torch's range for a seed."""
    return ticket("model", seed) >> 1


Sampling = Literal["fixed", "bernoulli"]


def within_population(eligible: Sequence[str], members: Collection[str], population: int) -> tuple[str, ...]:
    """Those of the eligible who may be drawn: members, and as many others, by id, as the population has places for."""
    places = max(0, population - len(members))
    joining = set([client for client in eligible if client not in members][:places])
    return tuple(client for client in eligible if client in members or client in joining)
