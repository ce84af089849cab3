"""FedProx: a proximal term that pulls each local step towards the received model.

    client    d       = g + mu * (y - x_t)
    server    x_{t+1} = x_t + eta_g * Dbar

mu = 0 is FedAvg. The paper samples clients by their size and averages uniformly. Its program, like this one, samples
uniformly and weights by examples, which has the same expectation. The method is meant for unequal local work.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020, algorithm 2.
"""

from __future__ import annotations

from algorithms.base import ClientContext, LocalRule, RoundInfo, UpdateInfo, Weights
from algorithms.compose import Correction, Method
from algorithms.parameters import NonNegativePerRound


def fedprox(mu: NonNegativePerRound = 0.01, weights: Weights = "examples") -> Method:
    """mu: strength of the proximal term; weights: by examples or uniform."""
    return Method(proximal(mu), weights)


def proximal(mu: float) -> Correction:
    """The correction of FedProx, for any server optimizer."""

    def local_rule(client: ClientContext) -> LocalRule:
        del client
        return LocalRule(mu=mu)

    def effective_steps(client: UpdateInfo, round_info: RoundInfo) -> float:
        """sum_k (1 - eta_l mu)^k: each later step shrinks the contribution of a step."""
        shrink = 1.0 - round_info.learning_rate * mu
        return float(client.num_steps) if shrink == 1.0 else (1.0 - shrink**client.num_steps) / (1.0 - shrink)

    return Correction(local_rule, effective_steps=effective_steps)
