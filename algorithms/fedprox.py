"""FedProx: every local step is drawn back to the model that was sent.

    client    d       = g + mu * (y - x_t)
    server    x_{t+1} = x_t + eta_g * Dbar

mu = 0 is FedAvg. The paper samples clients by their size and averages uniformly; its program, as here, samples
uniformly and weights by examples, which has the same expectation. It was made for unequal work: a straggler sends what
it has.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020, algorithm 2.
"""

from __future__ import annotations

from algorithms.base import ClientContext, LocalRule, RoundInfo, UpdateInfo, Weights
from algorithms.compose import Correction, Method
from algorithms.parameters import NonNegative


def fedprox(mu: NonNegative = 0.01, weights: Weights = "examples") -> Method:
    """mu: strength of the proximal term; weights: by examples or uniform."""
    return Method(proximal(mu), weights)


def proximal(mu: float) -> Correction:
    """The correction of FedProx, for any server optimizer."""

    def local_rule(client: ClientContext) -> LocalRule:
        del client
        return LocalRule(mu=mu)

    def length(client: UpdateInfo, round_info: RoundInfo) -> float:
        """sum_k (1 - eta_l mu)^k: a step's pull on the result shrinks with every step after it."""
        shrink = 1.0 - round_info.learning_rate * mu
        return float(client.num_steps) if shrink == 1.0 else (1.0 - shrink**client.num_steps) / (1.0 - shrink)

    return Correction(local_rule, length=length)
