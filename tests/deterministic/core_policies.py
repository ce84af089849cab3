"""The policies of the runs of depth 1, by the seed of a life."""

from __future__ import annotations

import random
from dataclasses import replace

from fl_server.rounds.metrics import BY_LOSS, StopPolicy
from fl_server.rounds.sampling import RoundPolicy
from tests.deterministic.core_buffer import OF, REST, buffered
from tests.deterministic.core_stages import STAGE_S

ROUNDS = 10
SECURE_EVERY = 5
"""One of so many lives has secure aggregation."""


def policy_of(seed: int, draw: random.Random) -> RoundPolicy:
    """The policy of a life's run. draw: what is drawn for the life."""
    policy = _plain(draw)
    if seed % OF == REST:
        return buffered(policy, random.Random(f"buffer {seed}"))
    return _secure(policy, random.Random(f"secure {seed}")) if seed % SECURE_EVERY == SECURE_EVERY - 1 else policy


def _plain(draw: random.Random) -> RoundPolicy:
    clients = draw.choice((1, 2, 3, 3, 4))
    uses_metric = draw.random() < 0.3
    policy = RoundPolicy(
        seed=draw.randrange(1000),
        sampling=draw.choice(("fixed", "fixed", "fixed", "bernoulli")),
        clients_per_round=clients,
        rate=0.4,
        min_clients=draw.randint(clients, 5),
        close=draw.choice(("cohort", "cohort", "goal")),
        quorum=draw.randint(0, clients),
        min_accepted=min(clients, draw.choice((1, 1, 2))),
        over_selection=1.5,
        exchanges=draw.choice((1, 1, 2)),
        population=draw.choice((0, 0, 6)),
        evaluate_every=draw.choice((0, 1, 1, 3)) if not uses_metric else 1,
        await_evaluation=uses_metric,
        ask_clients_every=draw.choice((0, 0, 2)),
        stop=StopPolicy(BY_LOSS, 0.1 if uses_metric else None, draw.choice((0, 6)) if uses_metric else 0),
        rounds_between_restarts=draw.choice((0, 2)),
        most_processes=draw.choice((0, 2)),
    )
    if policy.sampling == "fixed" or policy.seed % 3:
        return policy
    most = policy.seed % 2 * (ROUNDS - 3)
    return replace(
        policy, private=True, most_draws=most, close="cohort", quorum=0, min_accepted=0, exchanges=1, population=0
    )


def _secure(policy: RoundPolicy, draw: random.Random) -> RoundPolicy:
    """The policy with secure aggregation in place of what goes not with it."""
    clients = draw.choice((3, 4, 5, 5, 6, 7))
    return replace(
        policy, secure=True, on_drop="end" if draw.random() < 0.1 else "repeat", most_full=draw.choice((4, 5, 20)),
        stage_s=STAGE_S, sampling="fixed", clients_per_round=clients, min_clients=clients,
        quorum=draw.randint(3, clients), min_accepted=3, close="cohort", exchanges=1, population=0, private=False,
        most_draws=0,
    )  # fmt: skip
