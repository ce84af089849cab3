"""How a run's rounds are filled and closed: its policy, and cohorts and seeds as pure functions of the run's seed.

A restart draws the same clients. Every client gets a ticket, a 64-bit hash of (seed, round, attempt, id). A fixed-size
cohort is the clients with the lowest tickets; a Bernoulli cohort is those whose ticket is below rate * 2^64. Neither
depends on the order of the clients.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Literal

from fl_server.rounds.metrics import StopPolicy

_TICKETS = 1 << 64
_REDRAWS = 100
"""Too small Bernoulli cohorts in a row after which the fewest clients are drawn: a tiny rate must not block the
coordinator."""
Sampling = Literal["fixed", "bernoulli"]
WEIGHT = 0.2
"""Weight of the newest round in the over-selection: about five rounds have an influence."""
LOWEST = 1.1
"""Factor without drop-outs. Above 1, so that one slow client does not delay a round to its deadline."""
HIGHEST = 2.0
"""Largest factor. Beyond it clients' work is wasted; a quorum and replacements are better."""
_NEVER_STOPS = StopPolicy()


@dataclass(frozen=True, slots=True)
class Draw:
    """Identifies one draw of a run."""

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


def tickets(kind: str, *parts: object) -> Callable[[str], int]:
    """`ticket` of these parts and one more, a client: what they have in common is hashed once."""
    common = hashlib.blake2b("".join(f"{part}\x1f" for part in (kind, *parts)).encode(), digest_size=8)

    def of(client: str) -> int:
        whole = common.copy()
        whole.update(client.encode())
        return int.from_bytes(whole.digest(), "big")

    return of


def draw_fixed(pool: Iterable[str], size: int, draw: Draw) -> tuple[str, ...]:
    """`size` clients of the pool, uniformly without replacement; the whole pool if it is smaller (ALGORITHMS 7.2)."""
    of = tickets("fixed", draw.seed, draw.round, draw.attempt)
    clients = list(pool)
    ranked = zip(map(of, clients), clients, strict=True)
    # To sort all costs more than the few that one free slot of a run with a buffer needs.
    lowest = nsmallest(size, ranked) if 8 * size < len(clients) else sorted(ranked)[:size]
    return by_id(client for _, client in lowest)


def draw_bernoulli(pool: Iterable[str], rate: float, draw: Draw, fewest: int = 1) -> tuple[str, ...]:
    """Each client with probability `rate`, independently; an empty cohort is drawn again (ALGORITHMS 7.2, A24).

    So is one of less than `fewest` clients. The result is smaller only if the pool is. With 0 nothing is drawn again.
    """
    clients = by_id(pool)
    threshold = int(rate * _TICKETS)
    if threshold <= 0:
        raise ValueError(f"expected a rate over 0, got {rate}")
    for redraw in range(_REDRAWS):
        of = tickets("bernoulli", draw.seed, draw.round, draw.attempt, redraw)
        cohort = tuple(client for client in clients if of(client) < threshold)
        if len(cohort) >= fewest:
            return cohort
    # At so small a rate a cohort that is large enough has no more clients, each with the same probability.
    return draw_fixed(clients, fewest, draw)


def draw_evaluators(pool: Iterable[str], size: int, seed: int, round: int) -> tuple[str, ...]:
    """`size` clients of the pool to evaluate a committed round, or all with 0; independent of the training cohorts."""
    of = tickets("evaluation", seed, round)
    ranked = [client for _, client in sorted((of(client), client) for client in pool)]
    return by_id(ranked[:size] if size else ranked)


def training_seed(seed: int, round: int, client: str, draw: int = 0) -> int:
    """Seed of a client's batch order, augmentation and dropout; independent of attempt, process and time.

    draw: with secure aggregation, how many draws of this round were abandoned before.
    """
    return training_seeds(seed, round, [client], draw)[0]


def training_seeds(seed: int, round: int, clients: Iterable[str], draw: int = 0) -> list[int]:
    """`training_seed` of each client."""
    return list(map(tickets("training", seed, round, *([draw] if draw else [])), clients))


def drawn_steps(p: float, seed: int, round: int, most: int) -> int:
    """K ~ Geometric(p) of a round: P(K = k) = (1 - p)^(k - 1) p for k from 1. It is at most `most`.

    p: over 0 and at most 1.
    """
    if p >= 1.0:
        return 1
    survival = (ticket("steps", seed, round) + 0.5) / _TICKETS
    return min(most, 1 + int(math.log(survival) / math.log1p(-p)))


def initial_model_seed(seed: int) -> int:
    """Seed of the first model's random values, in torch's range for a seed."""
    return ticket("model", seed) >> 1


def within_population(eligible: Sequence[str], members: Collection[str], population: int) -> tuple[str, ...]:
    """Eligible clients that may be drawn: members, and others in the order of id until the population is full."""
    places = max(0, population - len(members))
    joining = set([client for client in eligible if client not in members][:places])
    return tuple(client for client in eligible if client in members or client in joining)


def bounds(start: float) -> tuple[float, float]:
    """(lowest, highest) factor of a run that starts at `start`; a start beyond the usual bounds widens them."""
    return min(LOWEST, start), max(HIGHEST, start)


def adapted(factor: float, start: float, in_time: int, dropped: int) -> float:
    """Clients drawn for each update wanted, with close = "goal", after a round: adapted to its drop-outs.

    The factor f starts at `round.over_selection`. A round in which a of the drawn delivered in time and d dropped out
    would have needed r = (a + d) / a, and changes it: f <- f + WEIGHT (clip(r) - f). A client that was still at work
    when the goal was reached was only slower, and counts as neither.

    Args:
        factor: of that round, within `bounds(start)`; so is the result.
        start: the run's first factor, 1 or more.
        in_time: clients that delivered before the round closed, 1 or more.
        dropped: clients that were drawn for it and did not: lost, failed, refused, or at work after the deadline.
    """
    lowest, highest = bounds(start)
    seen = min(max((in_time + dropped) / in_time, lowest), highest)
    return factor + WEIGHT * (seen - factor)


@dataclass(frozen=True, slots=True)
class RoundPolicy:
    """How a run's rounds are filled and closed. It is fixed for the life of the run."""

    seed: int
    sampling: Sampling = "fixed"
    clients_per_round: int = 1
    """m of fixed-size sampling."""
    rate: float = 0.0
    """p of Bernoulli sampling."""
    min_clients: int = 1
    """Clients that must be eligible before the first draw of a round."""
    close: Literal["cohort", "goal", "buffer"] = "cohort"
    concurrency: int = 1
    """With close = "buffer": most clients at work."""
    goal: int = 1
    """With close = "buffer": updates of a step."""
    max_staleness: int = 0
    """With close = "buffer": most steps between the version that an update began from and the step that it is in."""
    quorum: int = 1
    """Fewest updates that may close a round; a smaller cohort needs all of itself. 0: half of the goal."""
    min_accepted: int = 1
    """Fewest updates that a model may be made of: no cohort is smaller, and no round closes with fewer."""
    deadline_s: float = 600.0
    over_selection: float = 1.3
    """Clients drawn for each update wanted, with close = "goal", before any drop-out was observed."""
    exchanges: int = 1
    """Collections in a round."""
    population: int = 0
    """N, the most clients that may ever take part; 0: no limit."""
    evaluate_every: int = 1
    """Rounds between evaluations; 0: never."""
    await_evaluation: bool = False
    """The next round waits for the evaluation, because a stop rule uses its metric."""
    ask_clients_every: int = 0
    """Rounds between evaluations by clients; 0: never."""
    await_clients: bool = False
    """The next round waits for the clients' evaluation, because a stop rule uses its metric."""
    stop: StopPolicy = _NEVER_STOPS
    """When an evaluation ends the run."""
    most_processes: int = 0
    """Processes of one client's daemon that are sent the work of an exchange without an answer; 0: no limit."""
    rounds_between_restarts: int = 0
    """Rounds that are committed between two restarts of the client states because of lost ones."""
    private: bool = False
    """Client-level privacy: each client is drawn by itself, and a round closes with what came, even nothing. There are
    no replacements, because who takes part must not depend on the others."""
    most_draws: int = 0
    """Draws of cohorts that the run's privacy budget allows; 0: no limit."""
    secure: bool = False
    """Secure aggregation: updates are masked, so a cohort has no replacements, and a round that loses too many of its
    clients is abandoned with all that it has."""
    on_drop: Literal["repeat", "end"] = "repeat"
    """What follows an abandoned round: another draw for it, or the end of the run."""
    tells_clients: bool = True
    """Whether reasons tell how many clients of a cohort have answered, and which one has spoiled its round."""
    most_full: int = 20
    """Clients up to which everybody holds shares of everybody's secrets, so that no coins are tossed for the graph."""
    stage_s: float = 60.0
    """Deadline of each stage of secure aggregation, but for the masked updates, which have `deadline_s`."""

    @property
    def buffered(self) -> bool:
        """Whether the rules of `buffer.py` hold."""
        return self.close == "buffer"

    def cohort(self, candidates: Iterable[str], size: int, draw: Draw) -> tuple[str, ...]:
        """The first cohort of a round. size: that of a fixed cohort."""
        if self.sampling == "bernoulli":
            return draw_bernoulli(candidates, self.rate, draw, 0 if self.private else self.min_accepted)
        return draw_fixed(candidates, size, draw)

    def goal_of(self, cohort: tuple[str, ...]) -> int:
        """The goal of a round whose first attempt drew this cohort: 1 for an empty one, since 0 is before the draw."""
        return max(1, len(cohort)) if self.sampling == "bernoulli" else min(self.clients_per_round, len(cohort))

    def drawn_of(self, clients: int) -> float:
        """How many of so many clients a round draws, in the mean."""
        return self.rate * clients if self.sampling == "bernoulli" else self.clients_per_round
